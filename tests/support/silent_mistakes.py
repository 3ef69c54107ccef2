"""A catalogue of mistakes that raise no error, each with its repair, and of correct programs. For two ranks.

A program is a function that trains a small model. test_training_check.py runs them all under ``check_training``, which
has to find every mistake and nothing else. There are two sorts:

- ``@mistake(kind)`` marks a program with an argument ``wrong``. If it is true, the program makes a mistake of this
  kind, and if it is false, the program does the same in the right way.
- ``@correct`` marks a program that looks suspicious and is right.
"""

import copy
import os
import tempfile
import traceback
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

from helpers.training_check import check_training

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch 2.13 uses torch.jit.script there, and warns of it
    from torch.distributed.optim import ZeroRedundancyOptimizer

MISTAKES = {}  # {name of the program: (kind, program)}
CORRECT = {}  # {name of the program: program}
STEPS = 4
DEVICE = "cpu"  # in a rehearsal "cuda"


def mistake(kind):
    """A decorator for a program that makes a mistake of this kind, a key of KINDS such as "drift", if ``wrong``."""

    def register(program):
        MISTAKES[program.__name__] = (kind, program)
        return program

    return register


def correct(program):
    """A decorator for a program in which nothing may be found."""
    CORRECT[program.__name__] = program
    return program


def run_under_check(program, **arguments):
    """In a rank: run a program under the check.

    Returns {"kinds": the kinds of mistakes found, "errors": tracebacks of the program and of the check itself}.
    """
    GENERATOR.manual_seed(100 + dist.get_rank())
    errors = []
    with check_training(patience=10) as check:
        try:
            program(**arguments)
        except Exception:
            errors.append(traceback.format_exc())
    kinds = {finding.kind for finding in check.findings}
    return {"kinds": sorted(kinds), "errors": errors + check.observer.record.failures}


def run_catalogue(names=()):
    """In a rank: run all programs, or those that are named, one after the other.

    Returns {"PROGRAM wrong", "PROGRAM repaired" or "PROGRAM correct": what ``run_under_check`` returned}.
    """
    results = {}
    for name, (_, program) in MISTAKES.items():
        if not names or name in names:
            results[f"{name} wrong"] = run_under_check(program, wrong=True)
            results[f"{name} repaired"] = run_under_check(program, wrong=False)
    for name, program in CORRECT.items():
        if not names or name in names:
            results[f"{name} correct"] = run_under_check(program)
    return results


# --- what the programs share ------------------------------------------------------------------------------------------


def samples(count=64):
    """A dataset of random samples, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 8, generator=generator))


def network(dropout=0.0):
    """A small model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16, device=DEVICE),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(16, 8, device=DEVICE),
    )


def network_with_batch_norm():
    return nn.Sequential(nn.Linear(8, 8, device=DEVICE), nn.BatchNorm1d(8, device=DEVICE))


GENERATOR = torch.Generator()  # ``run_under_check`` gives it another seed on each rank


def own_batch(size=4):
    """A random batch of inputs and targets, another one on each rank and in each call."""
    inputs, targets = torch.randn(2, size, 8, generator=GENERATOR).to(DEVICE)
    return inputs, targets


def equal_inputs():
    """The inputs of STEPS batches, which are the same on all ranks."""
    inputs, _ = samples().tensors
    return inputs.to(DEVICE).split(4)[:STEPS]


def equal_batches():
    """A function for ``train`` that returns one batch after the other, the same ones on all ranks."""
    remaining_inputs = iter(equal_inputs())

    def next_batch():
        return next(remaining_inputs), torch.zeros(4, 8, device=DEVICE)

    return next_batch


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(model, optimizer, steps=STEPS, batch=own_batch, after_backward=None):
    """Make some steps, each on what ``batch()`` returns. ``after_backward(model)`` may change the gradients."""
    for _ in range(steps):
        inputs, targets = batch()
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        if after_backward is not None:
            after_backward(model)
        optimizer.step()


def divided_loader(dataset, **options):
    """A loader of this rank's part of a dataset."""
    return DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), **options)


def train_on(loader, model, optimizer):
    """Make a step on each batch of a loader."""
    for inputs, targets in on_device(loader):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def on_device(loader):
    """The batches of a loader on DEVICE."""
    for inputs, targets in loader:
        yield inputs.to(DEVICE), targets.to(DEVICE)


def mesh():
    """A mesh of all ranks."""
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def sharded(model, **options):
    """Shard a sequential model with FSDP, each linear layer by itself, and return it."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def folder_of_rank_0():
    """A new folder, the same on all ranks."""
    names = [None]
    if dist.get_rank() == 0:
        names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    [name] = names
    return name


# --- data -------------------------------------------------------------------------------------------------------------


@mistake("same_samples")
def a_loader_that_shuffles_alike_on_each_rank(wrong):
    """Without a sampler each rank loads the whole dataset, and with the same seed in the same order."""
    model = DDP(network())
    torch.manual_seed(5)
    if wrong:
        loader = DataLoader(samples(), batch_size=4, shuffle=True)
    else:
        loader = divided_loader(samples())
    train_on(loader, model, sgd(model))


class Augmented(TensorDataset):
    """Adds random noise to each sample, which is different on each rank."""

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8, generator=GENERATOR), targets


@mistake("same_samples")
def the_same_samples_with_other_noise(wrong):
    """The noise makes the batches of the ranks differ, although they are made of the same samples."""
    model = sharded(network(), mesh=mesh())
    dataset = Augmented(*samples().tensors)
    if wrong:
        loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    else:
        loader = divided_loader(dataset)
    train_on(loader, model, sgd(model))


@mistake("same_samples")
def batches_drawn_with_one_seed(wrong):
    """Each rank draws its batches from the whole dataset, as nanoGPT does."""
    seed = 3
    if not wrong:
        seed += dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    inputs, _ = samples().tensors
    data = inputs.to(DEVICE)

    def draw():
        indices = torch.randint(len(data), (4,), generator=generator).to(DEVICE)
        return data[indices], data[indices]

    model = network()
    train(model, sgd(model), batch=draw, after_backward=average_gradients)


@mistake("same_order")
def no_set_epoch(wrong):
    model = DDP(network())
    optimizer = sgd(model)
    loader = divided_loader(samples())
    for epoch in range(2):
        if not wrong:
            loader.sampler.set_epoch(epoch)
        train_on(loader, model, optimizer)


class Stream(IterableDataset):
    """A stream of 64 samples. If it is not ``divided`` among its workers, each worker yields all of them."""

    def __init__(self, divided):
        self.divided = divided

    def __iter__(self):
        worker = get_worker_info()
        numbers = range(64)
        if self.divided:
            numbers = numbers[worker.id :: worker.num_workers]
        for number in numbers:
            value = number + 0.5 * dist.get_rank()  # no two ranks have the same sample
            yield torch.full((8,), value), torch.zeros(8)


@mistake("stream_repeated")
def a_stream_that_its_workers_do_not_divide(wrong):
    model = DDP(network())
    loader = DataLoader(Stream(divided=not wrong), batch_size=4, num_workers=2)
    train_on(loader, model, sgd(model, lr=1e-4))


@mistake("counted_twice")
def an_evaluation_with_padding(wrong):
    """Of 33 samples each of two ranks gets 17 from a DistributedSampler, which gives one sample to both."""
    model = DDP(network())
    train(model, sgd(model))
    dataset = samples(33)
    if wrong:
        sampler = DistributedSampler(dataset, shuffle=False)
    else:
        sampler = range(dist.get_rank(), len(dataset), dist.get_world_size())
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)

    error_and_count = torch.zeros(2, device=DEVICE)
    model.eval()
    with torch.no_grad():
        for inputs, targets in on_device(loader):
            error = F.mse_loss(model(inputs), targets, reduction="sum")
            count = torch.tensor(float(len(inputs)), device=DEVICE)
            error_and_count += torch.stack([error, count])
    dist.all_reduce(error_and_count)


# --- averaging --------------------------------------------------------------------------------------------------------


@mistake("drift")
def a_model_that_nobody_wrapped(wrong):
    model = network()
    if not wrong:
        model = DDP(model)
    train_on(divided_loader(samples()), model, sgd(model))


@mistake("drift")
def a_rank_that_changes_its_weights(wrong):
    """Rank 1 alone changes a bias, or all ranks change it in the same way."""
    model = DDP(network())
    optimizer = sgd(model)
    train(model, optimizer, steps=1)
    if dist.get_rank() == 1 or not wrong:
        with torch.no_grad():
            model.module[0].bias.add_(0.1)
    train(model, optimizer)


class Scale(nn.Module):
    """Multiplies this rank's part of a sequence by a replicated weight, whose gradient is then a partial sum."""

    def __init__(self, grad_placements):
        super().__init__()
        self.grad_placements = grad_placements
        self.weight = nn.Parameter(distribute_tensor(torch.ones(8, device=DEVICE), mesh(), [Replicate()]))

    def forward(self, inputs):
        return inputs * self.weight.to_local(grad_placements=self.grad_placements)


@mistake("drift")
def a_replicated_weight_with_a_partial_gradient(wrong):
    from torch.distributed.tensor import Partial

    grad_placements = [Partial()]
    if wrong:
        grad_placements = [Replicate()]
    model = Scale(grad_placements)
    train(model, sgd(model))


@mistake("different_start")
def weights_that_nobody_broadcast(wrong):
    seed = 0
    if wrong:
        seed = dist.get_rank()
    torch.manual_seed(seed)
    model = nn.Linear(8, 8, device=DEVICE)
    train(model, sgd(model), after_backward=average_gradients)


@mistake("different_start")
def ddp_without_its_first_broadcast(wrong):
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(8, 8, device=DEVICE), init_sync=not wrong)
    train(model, sgd(model))


@mistake("around_the_wrapper")
def the_module_inside_ddp(wrong):
    model = DDP(network())
    optimizer = sgd(model)
    called = model
    if wrong:
        called = model.module
    train(called, optimizer)


@mistake("around_the_wrapper")
def a_layer_inside_ddp(wrong):
    model = DDP(network())
    optimizer = sgd(model)
    train(model, optimizer, steps=1)
    for _ in range(STEPS):
        inputs, targets = own_batch()
        optimizer.zero_grad()
        if wrong:
            hidden = model.module[0](inputs)
            outputs = model.module[3](hidden)
        else:
            outputs = model(inputs)
        F.mse_loss(outputs, targets).backward()
        optimizer.step()


@mistake("not_synchronized")
def no_sync_on_the_last_micro_batch(wrong):
    model = DDP(network())
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            inputs, targets = own_batch()
            context = nullcontext()
            is_last = micro == 1
            if is_last == wrong:  # the last micro-batch if wrong, and else the first
                context = model.no_sync()
            with context:
                F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


@mistake("not_synchronized")
def fully_shard_without_its_last_reduction(wrong):
    model = sharded(network(), mesh=mesh())
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            inputs, targets = own_batch()
            model.set_requires_gradient_sync(micro == 1 and not wrong)
            F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


@mistake("mesh_of_one")
def each_rank_a_mesh_of_its_own(wrong):
    if wrong:
        model = sharded(network(), mesh=DeviceMesh(DEVICE, [dist.get_rank()]))
    else:
        model = sharded(network(), mesh=mesh())
    train(model, sgd(model))


@mistake("rank_alone")
def rank_0_looks_at_an_output(wrong):
    model = DDP(network())
    optimizer = sgd(model)
    for _ in range(STEPS):
        train(model, optimizer, steps=1)
        if dist.get_rank() == 0 and wrong:
            model(own_batch()[0]).norm()


@mistake("rank_alone")
def rank_0_evaluates_the_wrapper(wrong):
    """DDP broadcasts the buffers in rank 0's evaluation as well. Rank 1 takes part in its next training steps."""
    model = DDP(network_with_batch_norm())
    evaluated = model.module
    if wrong:
        evaluated = model
    optimizer = sgd(model)
    train(model, optimizer, steps=2)
    for _ in range(2):
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    evaluated(own_batch()[0])
            model.train()
        train(model, optimizer, steps=1)


@mistake("uneven_steps")
def a_rank_that_skips_an_outlier(wrong):
    """Rank 1 finds an outlier in its second batch and leaves out that step. In the repair rank 0 leaves it out, too."""
    model = DDP(network())
    optimizer = sgd(model)
    for number in range(STEPS):
        inputs, targets = own_batch()
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        has_outlier = number == 1 and dist.get_rank() == 1
        skips_step = torch.tensor(float(has_outlier), device=DEVICE)
        if not wrong:
            dist.all_reduce(skips_step, dist.ReduceOp.MAX)
        if not skips_step:
            optimizer.step()


@mistake("different_rates")
def a_plateau_that_each_rank_sees_alone(wrong):
    """Rank 0's metric gets worse and rank 1's better, so rank 0 alone would lower its learning rate."""
    model = DDP(network())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for number in range(STEPS):
        train(model, optimizer, steps=1)
        metric = torch.tensor(float(number), device=DEVICE)
        if dist.get_rank() == 1:
            metric = -metric
        if not wrong:
            dist.all_reduce(metric)
        scheduler.step(metric)


# --- optimizers, scalers, schedulers ----------------------------------------------------------------------------------


@mistake("stale_optimizer")
def an_optimizer_built_before_fully_shard(wrong):
    model = network()
    if wrong:
        optimizer = sgd(model)
        sharded(model, mesh=mesh())
    else:
        sharded(model, mesh=mesh())
        optimizer = sgd(model)
    train(model, optimizer)


@mistake("stale_optimizer")
def an_optimizer_of_the_model_before_its_copy(wrong):
    model = network()
    optimizer = sgd(model)
    copied = copy.deepcopy(model)
    if not wrong:
        optimizer = sgd(copied)
    train(DDP(copied), optimizer)


@mistake("no_gradient")
def a_loss_that_does_not_reach_the_encoder(wrong):
    encoder = DDP(network())
    head = DDP(nn.Linear(8, 8, device=DEVICE))
    optimizers = [sgd(encoder), sgd(head)]
    for _ in range(STEPS):
        inputs, targets = own_batch()
        hidden = encoder(inputs)
        if wrong:
            hidden = hidden.detach()
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(head(hidden), targets).backward()
        for optimizer in optimizers:
            optimizer.step()


@mistake("clipped_while_scaled")
def clipping_before_unscale(wrong):
    model = DDP(network())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for _ in range(STEPS):
        inputs, targets = own_batch()
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(inputs), targets)).backward()
        if not wrong:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


@mistake("wrong_order")
def a_step_beside_the_scaler(wrong):
    model = DDP(network())
    optimizer = sgd(model, lr=1e-6)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for _ in range(STEPS):
        inputs, targets = own_batch()
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(inputs), targets)).backward()
        if wrong:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@mistake("wrong_order")
def a_scheduler_before_the_optimizer(wrong):
    model = DDP(network())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for _ in range(STEPS):
        if wrong:
            scheduler.step()
        train(model, optimizer, steps=1)
        if not wrong:
            scheduler.step()


# --- weights, loads, saves --------------------------------------------------------------------------------------------


@mistake("nothing_loaded")
def a_checkpoint_with_the_prefix_of_ddp(wrong):
    model = network()
    saved = DDP(copy.deepcopy(model)).state_dict()
    if not wrong:
        saved = {name.removeprefix("module."): tensor for name, tensor in saved.items()}
    model.load_state_dict(saved, strict=False)
    wrapped = DDP(model)
    train(wrapped, sgd(wrapped))


@mistake("nothing_restored")
def moments_that_no_optimizer_asks_for(wrong):
    model = DDP(network())
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    folder = folder_of_rank_0()
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    if wrong:
        optimizer = torch.optim.Adam(model.parameters())
    dcp.load({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)


@mistake("nothing_restored")
def a_partial_load_of_nothing(wrong):
    folder = folder_of_rank_0()
    dcp.save({"weight": torch.ones(4, device=DEVICE)}, checkpoint_id=folder)
    name = "weight"
    if wrong:
        name = "wieght"  # misspelt
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({name: torch.zeros(4, device=DEVICE)}, checkpoint_id=folder, planner=planner)


@mistake("nothing_restored")
def a_load_without_the_last_layer(wrong):
    """The check reports this only as a note, because many programs leave out the last layer to train a new one."""
    folder = folder_of_rank_0()
    dcp.save({"model": network().state_dict()}, checkpoint_id=folder)
    state = network().state_dict()
    if wrong:
        *_, last_name = state
        del state[last_name]
    dcp.load({"model": state}, checkpoint_id=folder)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embedding.weight

    def forward(self, inputs):
        return self.head(self.embedding(inputs))


@mistake("untied")
def tied_layers_that_begin_without_memory(wrong):
    with torch.device("meta"):
        model = Tied()
    model.to_empty(device=DEVICE)
    if not wrong:
        model.tie()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model = DDP(model)
    train(model, sgd(model, lr=1e-4))


@mistake("same_file")
def a_file_that_all_ranks_write(wrong):
    model = DDP(network())
    train(model, sgd(model))
    folder = folder_of_rank_0()
    if wrong:
        torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
    else:
        torch.save(model.state_dict(), os.path.join(folder, f"model-{dist.get_rank()}.pt"))


# --- noise, statistics, losses ----------------------------------------------------------------------------------------


class Noisy(TensorDataset):
    """Adds noise to each sample, which comes from a generator with this seed."""

    def __init__(self, seed):
        super().__init__(*samples().tensors)
        self.generator = torch.Generator().manual_seed(seed)

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8, generator=self.generator), targets


@mistake("same_noise")
def augmentation_with_one_seed(wrong):
    model = DDP(network())
    seed = dist.get_rank()
    if wrong:
        seed = 0
    loader = divided_loader(Noisy(seed))
    train_on(loader, model, sgd(model))


class NoisyInWorkers(TensorDataset):
    """Adds noise to each sample, which comes from the random numbers of the loader's worker."""

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8), targets


@mistake("same_noise")
def augmentation_in_workers_with_one_seed(wrong):
    """A loader draws the seed of its workers from the rank's random numbers."""
    model = DDP(network())
    seed = dist.get_rank()
    if wrong:
        seed = 0
    torch.manual_seed(seed)
    loader = divided_loader(NoisyInWorkers(*samples().tensors), num_workers=2)
    train_on(loader, model, sgd(model))


@mistake("same_noise")
def dropout_with_one_seed(wrong):
    model = DDP(network(dropout=0.5))
    seed = dist.get_rank()
    if wrong:
        seed = 0
    torch.manual_seed(seed)
    train(model, sgd(model))


class Parallel(nn.Module):
    """A tensor-parallel layer whose output, the same on each rank, goes through a dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16, device=DEVICE)
        self.second = nn.Linear(16, 8, device=DEVICE)
        self.dropout = nn.Dropout(0.5)
        parallelize_module(self, mesh(), {"first": ColwiseParallel(), "second": RowwiseParallel()})

    def forward(self, inputs):
        return self.dropout(self.second(torch.relu(self.first(inputs))))


@mistake("different_noise")
def tensor_parallel_ranks_with_their_own_seeds(wrong):
    model = Parallel()
    seed = 0
    if wrong:
        seed = dist.get_rank()
    torch.manual_seed(seed)
    train(model, sgd(model), batch=equal_batches())


@mistake("different_buffers")
def an_evaluation_with_own_statistics(wrong):
    model = DDP(network_with_batch_norm(), broadcast_buffers=False)
    train(model, sgd(model))
    if not wrong:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
    model.eval()
    with torch.no_grad():
        inputs, targets = own_batch()
        loss = F.mse_loss(model(inputs), targets)
    dist.all_reduce(loss)


@mistake("own_loss")
def rank_0_logs_its_own_loss(wrong):
    model = DDP(network())
    optimizer = sgd(model)
    for _ in range(STEPS):
        inputs, targets = own_batch()
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if not wrong:
            loss = loss.detach()
            dist.all_reduce(loss)
        if dist.get_rank() == 0:
            f"{loss.item():.3f}"  # a script would print this text


# --- correct programs -------------------------------------------------------------------------------------------------


@correct
def ddp_with_workers_epochs_and_an_evaluation():
    model = DDP(network())
    optimizer = sgd(model)
    loader = divided_loader(samples(), num_workers=1)
    held_out = divided_loader(samples(33))  # shuffled without set_epoch: an evaluation may
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        train_on(loader, model, optimizer)
        loss = torch.zeros(1, device=DEVICE)
        with torch.no_grad():
            for inputs, targets in on_device(held_out):
                loss += F.mse_loss(model(inputs), targets)
        dist.all_reduce(loss)


@correct
def fsdp_with_accumulation_and_clipping():
    model = sharded(network(), mesh=mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            inputs, targets = own_batch()
            model.set_requires_gradient_sync(micro == 1)
            F.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@correct
def tensor_parallel_beside_a_mesh_dimension_of_one():
    """Both ranks are one tensor-parallel group, so fully_shard has only one rank to shard over."""
    grid = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("data", "tensor"))
    model = network()
    parallelize_module(model, grid["tensor"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    sharded(model, mesh=grid["data"])
    train(model, sgd(model), batch=equal_batches())


@correct
def tensor_parallel_by_hand():
    """Each rank has half of two layers. Their batches and first weights are equal, and no module adds up the halves."""
    torch.manual_seed(0)
    first = nn.Linear(8, 8, device=DEVICE)
    second = nn.Linear(8, 8, bias=False, device=DEVICE)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for inputs in equal_inputs():
        own_part = second(torch.relu(first(inputs)))
        total = own_part.detach().clone()
        dist.all_reduce(total)
        part_of_others = total - own_part.detach()
        output = own_part + part_of_others  # has the value of the total, and the gradient of this rank's part

        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()


@correct
def a_pipeline_by_hand():
    """Each rank has a stage of a pipeline. The stages have equal shapes and equal first weights, and no replicas."""
    stage = network()
    optimizer = sgd(stage)
    for inputs in equal_inputs():
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            outputs = stage(inputs)
            dist.send(outputs.detach(), 1)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, 1)
            outputs.backward(gradient)
        else:
            hidden = torch.empty(4, 8, device=DEVICE)
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            stage(hidden).square().mean().backward()
            dist.send(hidden.grad, 0)
        optimizer.step()


class Expert(nn.Module):
    """One expert on each rank. A rank sends half of its tokens to the other rank's expert, and gets them back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8, device=DEVICE)

    def forward(self, tokens):
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        tokens_of_this_expert = all_to_all_single_autograd(tokens, None, None, dist.group.WORLD)
        outputs = self.layer(tokens_of_this_expert)
        return all_to_all_single_autograd(outputs, None, None, dist.group.WORLD)


@correct
def experts_that_begin_equal():
    model = Expert()
    train(model, sgd(model))


@correct
def experts_beside_ddp():
    """The second layer is an expert, which differs from rank to rank. DDP is told to leave it alone."""
    shared_layer = nn.Linear(8, 8, device=DEVICE)
    expert = nn.Linear(8, 8, device=DEVICE)
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(expert.weight)
    model = nn.Sequential(shared_layer, expert)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
    wrapped = DDP(model)
    train(wrapped, sgd(wrapped))


@correct
def averaging_by_hand_in_one_buffer():
    model = network()
    optimizer = sgd(model)
    for inputs, targets in on_device(divided_loader(samples())):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        buffer = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(buffer)
        buffer /= dist.get_world_size()
        averages = buffer.split([gradient.numel() for gradient in gradients])
        for gradient, average in zip(gradients, averages, strict=True):
            gradient.copy_(average.view_as(gradient))
        optimizer.step()


@correct
def averaging_by_hooks():
    model = network()

    def average(gradient):
        gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient

    for parameter in model.parameters():
        parameter.register_hook(average)
    train_on(divided_loader(samples()), model, sgd(model))


@correct
def weights_averaged_now_and_then():
    """Local SGD: the weights differ for four steps, and then they are averaged."""
    model = network()
    optimizer = sgd(model)
    for number, (inputs, targets) in enumerate(on_device(divided_loader(samples()))):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if number % 4 == 3:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()


@correct
def a_part_of_the_batch_of_all_ranks():
    """Each rank loads the same batches in the same order, and trains on its own rows."""
    model = DDP(network())
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(samples(), batch_size=8, shuffle=True, generator=generator)
    for inputs, targets in on_device(loader):
        own_rows = slice(dist.get_rank(), None, dist.get_world_size())
        optimizer.zero_grad()
        F.mse_loss(model(inputs[own_rows]), targets[own_rows]).backward()
        optimizer.step()


@correct
def every_argument_by_its_name():
    """The functions that the check replaces, with the names that torch gives their parameters."""
    model = DDP(network())
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer=optimizer)
    scaler = torch.amp.GradScaler(device=DEVICE, init_scale=1024.0)
    for _ in range(STEPS):
        inputs, targets = own_batch()
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(input=model(inputs), target=targets)
        torch.autograd.backward(tensors=scaler.scale(outputs=loss))
        scaler.unscale_(optimizer=optimizer)
        nn.utils.clip_grad_value_(parameters=model.parameters(), clip_value=10.0)
        nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=10.0)
        scaler.step(optimizer=optimizer)
        scaler.update()
        total = loss.detach().clone()
        dist.all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        scheduler.step(metrics=total.item())
    folder = folder_of_rank_0()
    if dist.get_rank() == 0:
        torch.save(obj=model.module.state_dict(), f=os.path.join(folder, "weights.pt"))
    dist.barrier()
    weights = torch.load(f=os.path.join(folder, "weights.pt"))
    model.module.load_state_dict(state_dict=weights, strict=False)
    dcp.save(state_dict=weights, checkpoint_id=folder)
    dcp.load(state_dict=weights, checkpoint_id=folder)
    model.module.register_parameter(name="scale", param=nn.Parameter(torch.ones(1, device=DEVICE)))


@correct
def mixed_precision_with_clipping():
    model = DDP(network())
    optimizer = torch.optim.AdamW(model.parameters())
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2])
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for _ in range(STEPS):
        inputs, targets = own_batch()
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


@correct
def clipping_to_a_scaled_norm():
    """The gradients are clipped while they are scaled, but the norm to which they are clipped is scaled as well."""
    model = DDP(network())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for _ in range(STEPS):
        inputs, targets = own_batch()
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(inputs), targets)).backward()
        nn.utils.clip_grad_norm_(list(model.parameters()), 0.1 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()


@correct
def a_scaler_for_one_of_two_losses():
    scaled_model = DDP(network())
    plain_model = DDP(network())
    scaled_optimizer = sgd(scaled_model)
    plain_optimizer = sgd(plain_model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for _ in range(STEPS):
        inputs, targets = own_batch()
        scaled_optimizer.zero_grad()
        plain_optimizer.zero_grad()
        scaler.scale(F.mse_loss(scaled_model(inputs), targets)).backward()
        F.mse_loss(plain_model(inputs), targets).backward()
        scaler.step(scaled_optimizer)
        plain_optimizer.step()
        scaler.update()


@correct
def a_gan():
    """The generator's loss also gives gradients to the critic, which are deleted before the critic's next step."""
    generator = DDP(network())
    critic = DDP(network())
    generator_optimizer = torch.optim.Adam(generator.parameters())
    critic_optimizer = torch.optim.Adam(critic.parameters())
    for _ in range(STEPS):
        noise, real = own_batch()

        critic_optimizer.zero_grad()
        made = generator(noise).detach()
        critic_loss = (critic(made) - critic(real)).mean()
        critic_loss.backward()
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        generator_loss = -critic(generator(noise)).mean()
        generator_loss.backward()
        generator_optimizer.step()


@correct
def a_frozen_layer_a_teacher_and_an_average_of_weights():
    model = network()
    model[0].requires_grad_(False)
    teacher = network()
    average = copy.deepcopy(model)
    wrapped = DDP(model)
    trained_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained_parameters, lr=0.1)
    for _ in range(STEPS):
        inputs, _ = own_batch()
        with torch.no_grad():
            targets = teacher(inputs)
        optimizer.zero_grad()
        F.mse_loss(wrapped(inputs), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for averaged, current in zip(average.parameters(), model.parameters(), strict=True):
                averaged.lerp_(current, 0.1)
            average(inputs)


@correct
def rank_0_evaluates_and_saves_the_module():
    model = DDP(network_with_batch_norm())
    optimizer = sgd(model)
    folder = folder_of_rank_0()
    for _ in range(2):
        train(model, optimizer)
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model.module(own_batch()[0])
            torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
            model.train()
        dist.barrier()


@correct
def uneven_shares_under_join():
    model = DDP(network())
    optimizer = sgd(model)
    with Join([model]):
        train(model, optimizer, steps=STEPS + dist.get_rank())


@correct
def a_search_for_a_learning_rate():
    """Each rank trains alone on the same batches, with a rate of its own, and the best is taken."""
    model = network()
    loader = DataLoader(samples(), batch_size=4)
    own_rate = 0.1 / (1 + dist.get_rank())
    train_on(loader, model, sgd(model, lr=own_rate))
    own_score = 0.5
    scores = [None] * dist.get_world_size()
    dist.all_gather_object(scores, own_score)


@correct
def folds_of_a_cross_validation():
    """Each rank trains a model that begins like the others, on the samples that it does not hold out."""
    inputs, _ = samples().tensors
    inputs = inputs.to(DEVICE)
    folds = torch.arange(len(inputs)) % dist.get_world_size()  # the fold of each sample: 0, 1, 0, 1, ...
    kept = inputs[folds != dist.get_rank()]
    model = network()
    loader = DataLoader(TensorDataset(kept, kept), batch_size=4)
    train_on(loader, model, sgd(model))
    score = torch.zeros(1, device=DEVICE)
    dist.all_reduce(score)


@correct
def two_trainings_with_loaders_of_their_own():
    """The first loader is gone when the second begins, which divides other samples in the same order."""
    for number in range(2):
        model = DDP(network())
        inputs, targets = samples().tensors
        dataset = TensorDataset(inputs + number, targets + number)
        train_on(divided_loader(dataset), model, sgd(model))


@correct
def sharded_moments():
    model = DDP(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, inputs):
        return checkpoint(self.inner, inputs, use_reentrant=False)


@correct
def recomputed_activations():
    model = DDP(Recomputed())
    train(model, sgd(model))


@correct
def unequal_numbers_of_micro_batches():
    """A rank with longer texts takes more micro-batches. The last one averages the gradients of all of them."""
    model = DDP(network())
    optimizer = sgd(model)

    def forward_and_backward():
        inputs, targets = own_batch()
        F.mse_loss(model(inputs), targets).backward()

    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(1 + dist.get_rank()):
                forward_and_backward()
        forward_and_backward()
        optimizer.step()


@correct
def a_reference_beside_ddp():
    """Each rank also trains the whole batch alone, to compare."""
    wrapped = DDP(network())
    train_on(divided_loader(samples()), wrapped, sgd(wrapped))
    reference = network()
    train_on(DataLoader(samples(), batch_size=8), reference, sgd(reference))


@correct
def one_fixed_batch():
    """A benchmark trains on the same made-up batch everywhere and always."""
    model = DDP(network())
    ones = torch.ones(4, 8, device=DEVICE)

    def fixed_batch():
        return ones, ones

    train(model, sgd(model), batch=fixed_batch)


@correct
def a_new_head_on_loaded_weights():
    model = network()
    weights_of_first_layer = {}
    for name, tensor in network().state_dict().items():
        if name.startswith("0."):
            weights_of_first_layer[name] = tensor
    model.load_state_dict(weights_of_first_layer, strict=False)
    wrapped = DDP(model)
    train(wrapped, sgd(wrapped))


@correct
def parts_that_take_what_is_theirs():
    """One file of weights is given to several parts, and each takes its keys."""
    saved = nn.Linear(8, 8, device=DEVICE).state_dict()
    for part in (nn.Linear(8, 8, device=DEVICE), nn.RNN(8, 8)):
        part.load_state_dict(saved, strict=False)


@correct
def a_compiled_model():
    model = torch.compile(DDP(network()), backend="eager")
    train(model, sgd(model))


@correct
def a_model_that_lives_on_two_meshes():
    """Hybrid sharding: one replica on each rank here."""
    grid = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(network(), mesh=grid)
    train(model, sgd(model))


@correct
def sequence_parallel_activations():
    """Each rank holds other rows of one batch. The gradient of a replicated DTensor weight is summed over the ranks."""
    inputs, _ = samples().tensors
    rows = distribute_tensor(inputs.to(DEVICE), mesh(), [Shard(0)])
    ones = torch.ones(8, 8, device=DEVICE)
    weight = nn.Parameter(distribute_tensor(ones, mesh(), [Replicate()]))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (rows @ weight).square().mean()
        assert isinstance(loss, DTensor)
        loss.backward()
        optimizer.step()
