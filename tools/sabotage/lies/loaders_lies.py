"""Lies (planted faults) about samplers and data loaders."""

from typing import Any

from sabotage.lies.telling_lies import C10D, SAMPLER, build_with, instead_of, lie, nothing, replace, swap

LOADER = "torch.utils.data.dataloader"
WORKER = "torch.utils.data._utils.worker"

# --- Samplers and loaders


@lie("03 cheat_sheet", "set_epoch", module=SAMPLER)
def set_epoch_is_ignored(module: Any) -> None:
    """`set_epoch` is ignored: every epoch has one order."""
    replace(module.DistributedSampler, "set_epoch", nothing)


@lie("03", "repeat|same number|pad", module=SAMPLER)
def sampler_drops_its_padding(module: Any) -> None:
    """`DistributedSampler` repeats no sample, so that the ranks get unequal numbers of them."""

    @instead_of(module.DistributedSampler, "__iter__")
    def indices(original: Any, self: Any) -> Any:
        # The ranks take samples in turn. What comes after the last sample of the data set is padding.
        samples_of_rank = []
        for turn, sample in enumerate(original(self)):
            position = turn * self.num_replicas + self.rank
            is_padding = position >= len(self.dataset)
            if not is_padding:
                samples_of_rank.append(sample)
        return iter(samples_of_rank)


@lie("03 04", "seed|one common|order|every `?world_size", module=SAMPLER)
def each_rank_shuffles_with_its_own_seed(module: Any) -> None:
    """`DistributedSampler` shuffles with another seed on each rank."""

    @instead_of(module.DistributedSampler, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords)
        self.seed += self.rank


@lie("03", "augment|noise|random|seed", module=WORKER)
def workers_draw_the_same_numbers(module: Any) -> None:
    """All workers of a loader get one seed."""

    @instead_of(module, "_worker_loop")
    def worker_loop(original: Any, *inputs: Any) -> Any:
        arguments = list(inputs)
        arguments[8] -= inputs[10]  # base_seed, to which the loop adds worker_id
        original(*arguments)


@lie("03 10", "position|resume", notebook=True)
def sampler_forgets_its_position(text: str) -> str:
    """A checkpoint without the sampler: its position is saved and not restored."""
    return swap(text, r"state[\"position\"]", "0")


@lie("03", "len\\(loader\\)|length", notebook=True)
def length_is_what_is_left(text: str) -> str:
    """The length of a loader with `GlobalBatches` is what is left of the epoch."""
    return swap(text, "return self.size // self.batch_size", "return (self.size - self.position) // self.batch_size")


@lie("03b", "weight", notebook=True)
def each_rank_keeps_all_weighted_draws(text: str) -> str:
    """Each rank uses all weighted draws, not every `world_size`-th."""
    return swap(text, "mine = drawn[dist.get_rank() :: dist.get_world_size()]", "mine = drawn")


@lie("03", "generator", module=LOADER)
def loader_ignores_its_generator(module: Any) -> None:
    """A loader ignores its `generator`: workers get their seed from the rank's random numbers."""
    build_with(module.DataLoader, generator=None)


@lie("03", "persistent", module=LOADER)
def persistent_workers_keep_the_first_order(module: Any) -> None:
    """With persistent workers a loader asks its sampler once: the order of the first epoch comes again."""

    @instead_of(module._BaseDataLoaderIter, "_reset")
    def _reset(original: Any, self: Any, loader: Any, first_iter: bool = False) -> None:
        original(self, loader, first_iter)
        if self._persistent_workers:
            if first_iter:
                self.first_order = list(self._index_sampler)
            self._sampler_iter = iter(self.first_order)


@lie("03", "new order|shuffle=True", module="torch.utils.data.sampler")
def shuffle_has_one_order(module: Any) -> None:
    """`DataLoader(shuffle=True)` has the same order in every epoch."""

    @instead_of(module.RandomSampler, "__iter__")
    def indices(original: Any, self: Any) -> Any:
        if not hasattr(self, "first_order"):
            self.first_order = list(original(self))
        return iter(self.first_order)


@lie("03", "before the loop", module=SAMPLER)
def set_epoch_changes_a_loop_that_runs(module: Any) -> None:
    """`set_epoch` takes effect at once, also in a loop over the loader that has begun."""

    @instead_of(module.DistributedSampler, "__iter__")
    def indices(original: Any, self: Any) -> Any:
        orders: dict[int, list[int]] = {}

        def one_by_one() -> Any:
            for turn in range(self.num_samples):
                if self.epoch not in orders:
                    orders[self.epoch] = list(original(self))
                yield orders[self.epoch][turn]

        return one_by_one()


@lie("03", "Adam", module="torch.optim.adam")
def adam_does_not_rescale(module: Any) -> None:
    """Adam does not rescale gradients: a small gradient makes a small step."""
    build_with(module.Adam, eps=1.0)


@lie("03", "NumPy", notebook=True)
def noise_seed_has_more_than_32_bits(text: str) -> str:
    """The seed of the noise goes to NumPy as it is, also if it has more than 32 bits."""
    return swap(text, "noise_seed % 2**32", "noise_seed")


@lie("03", "learning rate", notebook=True)
def ddp_loop_sums_its_losses(text: str) -> str:
    """The loop with DDP takes the sum of its losses, not their mean."""
    return swap(text, "labels)  # the mean of this part", r"labels, reduction=\"sum\")")


# --- Data loaders in real projects


@lie("03b", "agree|stop", notebook=True)
def all_stop_with_the_last(text: str) -> str:
    """The generator stops all ranks with the last one, where it should stop them with the first."""
    return swap(text, "ReduceOp.MIN  # continue while all", "ReduceOp.MAX  # continue while all")


@lie("03b", "multiply its loss by 0", notebook=True)
def the_loss_of_no_batch_counts(text: str) -> str:
    """The loss of a rank without a batch is not multiplied by 0."""
    return swap(text, "loss = 0 * model(", "loss = 1 * model(")


@lie("03b", "worker.*batch", module=LOADER)
def workers_leave_out_a_batch_that_is_not_full(module: Any) -> None:
    """A loader drops each worker's last batch if it is not full."""

    @instead_of(module.DataLoader, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords | {"drop_last": keywords.get("num_workers", 0) > 1})


@lie("03b", "how often|each sample|count", module=C10D)
def ranks_gather_only_their_own_objects(c10d: Any) -> None:
    """`all_gather_object` gives each rank its own object, again and again."""

    def all_gather_object(found: Any, mine: Any, *inputs: Any, **keywords: Any) -> None:
        found[:] = [mine] * len(found)

    replace(c10d, "all_gather_object", all_gather_object)


@lie("03b", "resume", notebook=True)
def position_counts_from_the_resume(text: str) -> str:
    """The state of a stream counts only what was used since the last resume."""
    return swap(text, r"{\"position\": self.start + self.used}", r"{\"position\": self.used}")


@lie("03b", "nan", notebook=True)
def a_mean_over_nothing_is_zero(text: str) -> str:
    """A rank without samples reports a loss of 0, where the page says nan."""
    return swap(text, "mean = losses.mean()", "mean = losses.sum()")


@lie("03b", "forkserver", module=LOADER)
def workers_are_always_forked(module: Any) -> None:
    """A loader forks its workers, whatever its `multiprocessing_context`."""

    @instead_of(module.DataLoader, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(
            self, *inputs, **keywords | ({"multiprocessing_context": "fork"} if keywords.get("num_workers") else {})
        )


@lie("03b", "persistent", module=LOADER)
def workers_do_not_persist(module: Any) -> None:
    """`persistent_workers` is ignored: each epoch starts new workers."""
    build_with(module.DataLoader, persistent_workers=False)


@lie("03b", "list|memory", notebook=True)
def reading_a_list_copies_nothing(text: str) -> str:
    """The list's texts are not read, so that no page of them is copied."""
    return swap(text, "            self.dataset[place]", "            self.dataset[0]")


@lie("03b", "tensor", notebook=True)
def the_two_tensors_are_a_list(text: str) -> str:
    """A worker reads the texts of a list, also where the page says two tensors."""
    return swap(text, "launch(weigh, Packed", "launch(weigh, Listed")


@lie("03b", "handle|pickle", module="torch.multiprocessing.reductions")
def tensors_are_pickled_whole(module: Any) -> None:
    """A tensor is not moved to shared memory when it is sent to a process: all of it is pickled."""
    replace(module, "init_reductions", nothing)


@lie("03b", "preload|server", notebook=True)
def the_server_imports_nothing(text: str) -> str:
    """The fork server is not told to import torch, so that each worker imports it."""
    return swap(text, r"cost_of_a_worker(\"__main__\", \"torch\")", r"cost_of_a_worker(\"json\")")


@lie("03b", "map|file", notebook=True)
def each_rank_reads_the_file_of_texts(text: str) -> str:
    """Each rank reads the whole file of texts into memory of its own, where the page says that it is mapped."""
    return swap(text, r"np.memmap(self.path, dtype=np.uint8, mode=\"r\")", "np.fromfile(self.path, dtype=np.uint8)")


@lie("03b", "length|longest", notebook=True)
def the_pool_is_not_sorted(text: str) -> str:
    """The sampler by length does not sort its pool."""
    return swap(text, "by_length = sorted(pool, key=self.lengths.__getitem__)", "by_length = pool")


@lie("03b", "steps.* are shuffled", notebook=True)
def the_steps_are_not_shuffled(text: str) -> str:
    """The sampler by length does not shuffle its steps, so lengths grow within each pool."""
    return swap(text, "generator.shuffle(steps)", "pass")


@lie("03b", "fewest tokens", notebook=True)
def samples_are_dealt_by_their_number(text: str) -> str:
    """Each sample goes to the rank that has the fewest samples, not the fewest tokens."""
    return swap(text, "tokens[rank] += lengths[sample]", "tokens[rank] += 1")


@lie("03b", "prefetch_factor", module=LOADER)
def workers_load_one_batch_ahead(module: Any) -> None:
    """`prefetch_factor` is ignored: each worker loads one batch ahead."""

    @instead_of(module.DataLoader, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords)
        self.prefetch_factor = self.prefetch_factor and 1


@lie("03b", "larger than", notebook=True)
def the_batch_fits_into_shared_memory(text: str) -> str:
    """The batch that should be larger than `/dev/shm` has a megabyte."""
    return swap(text, ".expand(size + 2**20)", ".expand(2**20)")


@lie("03b", "process group", module=WORKER)
def spawned_workers_have_a_group(module: Any) -> None:
    """A worker that was not forked has a process group."""

    @instead_of(module, "_worker_loop")
    def worker_loop(original: Any, *inputs: Any) -> Any:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        original(*inputs)


@lie("03b", "persistent", module=LOADER)
def persistent_workers_see_changes(module: Any) -> None:
    """Persistent workers see what has changed in the dataset since they started."""

    @instead_of(module.DataLoader, "__iter__")
    def __iter__(original: Any, self: Any) -> Any:
        if self.persistent_workers:
            now = dict(vars(self.dataset))
            if now != getattr(self, "before", now):
                self._iterator = None
            self.__dict__["before"] = now
        return original(self)


@lie("03b", "NumPy", module="torch.utils.data._utils.fetch")
def reading_arrays_copies_their_pages(module: Any) -> None:
    """A forked worker that reads a NumPy array copies the array's pages."""

    @instead_of(module._MapDatasetFetcher, "fetch")
    def fetch(original: Any, self: Any, *inputs: Any) -> Any:
        import numpy as np

        fetched = original(self, *inputs)
        for owner in (self.dataset, getattr(self.dataset, "dataset", self.dataset)):
            for value in vars(owner).values():
                if isinstance(value, np.ndarray) and value.flags.writeable:
                    value += 0  # writes every page
        return fetched


@lie("03b", "prefetch_factor", module=LOADER)
def workers_load_four_ahead_by_default(module: Any) -> None:
    """Unless a loader is told otherwise, each worker loads four batches ahead, and not two."""

    @instead_of(module.DataLoader, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords)
        if self.num_workers > 0 and keywords.get("prefetch_factor") is None:
            self.prefetch_factor = 4
