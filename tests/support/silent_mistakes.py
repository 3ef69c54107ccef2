"""A catalogue of mistakes that raise no error, each with its repair, and of correct programs. For two ranks.

A program is a function. ``mistake(kind)`` marks one that makes the mistake if ``wrong``, and else is right; ``correct``
marks one that looks suspicious and is right. test_training_check.py runs them all under ``check_training``.
"""

import copy
import os
import tempfile
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

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch 2.13 uses torch.jit.script there, and warns of it
    from torch.distributed.optim import ZeroRedundancyOptimizer

MISTAKES = {}  # {name of the program: (kind, program)}
CORRECT = {}  # {name of the program: program}
STEPS = 4
DEVICE = "cpu"  # in a rehearsal "cuda"


def mistake(kind):
    def register(program):
        MISTAKES[program.__name__] = (kind, program)
        return program

    return register


def correct(program):
    CORRECT[program.__name__] = program
    return program


# --- what the programs share ------------------------------------------------------------------------------------------


def samples(count=64):
    """A dataset of random samples, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 8, generator=generator))


def network(dropout=0.0):
    """A small model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16, device=DEVICE), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 8, device=DEVICE)
    )


def own_batch(size=4):
    """A random batch, another on each rank and in each call."""
    inputs, targets = torch.randn(2, size, 8, generator=GENERATOR).to(DEVICE)
    return inputs, targets


GENERATOR = torch.Generator()


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(model, optimizer, steps=STEPS, batch=own_batch, after_backward=None):
    for _ in range(steps):
        inputs, targets = batch()
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        if after_backward is not None:
            after_backward(model)
        optimizer.step()


def divided_loader(dataset, **options):
    return DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), **options)


def train_on(loader, model, optimizer):
    for inputs, targets in on_device(loader):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def on_device(loader):
    for inputs, targets in loader:
        yield inputs.to(DEVICE), targets.to(DEVICE)


def mesh():
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def sharded(model, **options):
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
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return name[0]


# --- data -------------------------------------------------------------------------------------------------------------


@mistake("same_samples")
def a_loader_that_shuffles_alike_on_each_rank(wrong):
    model = DDP(network())
    torch.manual_seed(5)
    if wrong:
        loader = DataLoader(samples(), batch_size=4, shuffle=True)
    else:
        loader = divided_loader(samples())
    train_on(loader, model, sgd(model))


class Augmented(TensorDataset):
    """Adds noise to each sample, another on each rank."""

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8, generator=GENERATOR), targets


@mistake("same_samples")
def the_same_samples_with_other_noise(wrong):
    model = sharded(network(), mesh=mesh())
    dataset = Augmented(*samples().tensors)
    if wrong:
        loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    else:
        loader = divided_loader(dataset)
    train_on(loader, model, sgd(model))


@mistake("same_samples")
def batches_drawn_with_one_seed(wrong):
    seed = 3 if wrong else 3 + dist.get_rank()
    data = samples().tensors[0].to(DEVICE)
    generator = torch.Generator().manual_seed(seed)

    def draw():
        starts = torch.randint(len(data), (4,), generator=generator).to(DEVICE)
        return data[starts], data[starts]

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
    def __init__(self, divided):
        self.divided = divided

    def __iter__(self):
        worker = get_worker_info()
        numbers = range(64)
        if self.divided:
            numbers = numbers[worker.id :: worker.num_workers]
        for number in numbers:
            yield torch.full((8,), float(number)) + 0.5 * dist.get_rank(), torch.zeros(8)


@mistake("stream_repeated")
def a_stream_that_its_workers_do_not_divide(wrong):
    model = DDP(network())
    loader = DataLoader(Stream(divided=not wrong), batch_size=4, num_workers=2)
    train_on(loader, model, sgd(model, lr=1e-4))


@mistake("counted_twice")
def an_evaluation_with_padding(wrong):
    model = DDP(network())
    train(model, sgd(model))
    dataset = samples(33)
    if wrong:
        sampler = DistributedSampler(dataset, shuffle=False)
    else:
        sampler = range(len(dataset))[dist.get_rank() :: dist.get_world_size()]
    totals = torch.zeros(2, device=DEVICE)
    model.eval()
    with torch.no_grad():
        for inputs, targets in on_device(DataLoader(dataset, batch_size=4, sampler=sampler)):
            error = F.mse_loss(model(inputs), targets, reduction="sum")
            totals += torch.stack([error, torch.tensor(float(len(inputs)), device=DEVICE)])
    dist.all_reduce(totals)


# --- averaging --------------------------------------------------------------------------------------------------------


@mistake("drift")
def a_model_that_nobody_wrapped(wrong):
    model = network()
    if not wrong:
        model = DDP(model)
    train_on(divided_loader(samples()), model, sgd(model))


@mistake("drift")
def a_rank_that_changes_its_weights(wrong):
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

    model = Scale([Replicate()] if wrong else [Partial()])
    train(model, sgd(model))


@mistake("different_start")
def weights_that_nobody_broadcast(wrong):
    torch.manual_seed(dist.get_rank() if wrong else 0)
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
    train(model.module if wrong else model, optimizer)


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
            alone = micro == 1 if wrong else micro == 0
            with model.no_sync() if alone else nullcontext():
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
    own_mesh = DeviceMesh(DEVICE, [dist.get_rank()]) if wrong else mesh()
    model = sharded(network(), mesh=own_mesh)
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
    """Its broadcasts of buffers pair up with the other's, except between the first two steps."""
    model = DDP(nn.Sequential(nn.Linear(8, 8, device=DEVICE), nn.BatchNorm1d(8, device=DEVICE)))
    evaluated = model if wrong else model.module
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
    model = DDP(network())
    optimizer = sgd(model)
    for number in range(STEPS):
        inputs, targets = own_batch()
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        outlier = torch.tensor(float(number == 1 and dist.get_rank() == 1), device=DEVICE)
        if not wrong:
            dist.all_reduce(outlier, dist.ReduceOp.MAX)
        if not outlier:
            optimizer.step()


@mistake("different_rates")
def a_plateau_that_each_rank_sees_alone(wrong):
    model = DDP(network())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for number in range(STEPS):
        train(model, optimizer, steps=1)
        metric = torch.tensor(float(number if dist.get_rank() == 0 else -number), device=DEVICE)
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
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    name = "wieght" if wrong else "weight"
    dcp.load({name: torch.zeros(4, device=DEVICE)}, checkpoint_id=folder, planner=planner)


@mistake("nothing_restored")
def a_load_without_the_last_layer(wrong):
    """It is a note, because a new head is often meant."""
    folder = folder_of_rank_0()
    dcp.save({"model": network().state_dict()}, checkpoint_id=folder)
    state = network().state_dict()
    if wrong:
        last = list(state)[-1]
        del state[last]
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
    name = os.path.join(folder_of_rank_0(), "model.pt" if wrong else f"model-{dist.get_rank()}.pt")
    torch.save(model.state_dict(), name)


# --- noise, statistics, losses ----------------------------------------------------------------------------------------


class Noisy(TensorDataset):
    """Adds noise of its own generator to each sample."""

    def __init__(self, seed):
        super().__init__(*samples().tensors)
        self.generator = torch.Generator().manual_seed(seed)

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8, generator=self.generator), targets


@mistake("same_noise")
def augmentation_with_one_seed(wrong):
    model = DDP(network())
    train_on(divided_loader(Noisy(0 if wrong else dist.get_rank())), model, sgd(model))


class NoisyInWorkers(TensorDataset):
    """Adds noise of the worker's own random numbers to each sample."""

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8), targets


@mistake("same_noise")
def augmentation_in_workers_with_one_seed(wrong):
    """A loader draws the seed of its workers from the rank's random numbers."""
    model = DDP(network())
    torch.manual_seed(0 if wrong else dist.get_rank())
    loader = divided_loader(NoisyInWorkers(*samples().tensors), num_workers=2)
    train_on(loader, model, sgd(model))


@mistake("same_noise")
def dropout_with_one_seed(wrong):
    model = DDP(network(dropout=0.5))
    torch.manual_seed(0 if wrong else dist.get_rank())
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
    torch.manual_seed(dist.get_rank() if wrong else 0)
    data = iter(samples().tensors[0].to(DEVICE).split(4))
    train(model, sgd(model), batch=lambda: (next(data), torch.zeros(4, 8, device=DEVICE)))


@mistake("different_buffers")
def an_evaluation_with_own_statistics(wrong):
    model = DDP(
        nn.Sequential(nn.Linear(8, 8, device=DEVICE), nn.BatchNorm1d(8, device=DEVICE)), broadcast_buffers=False
    )
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
            f"{loss.item():.3f}"


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
        with torch.no_grad():
            loss = sum(F.mse_loss(model(inputs), targets) for inputs, targets in on_device(held_out))
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
    grid = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("data", "tensor"))
    model = network()
    parallelize_module(model, grid["tensor"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    sharded(model, mesh=grid["data"])
    data = iter(samples().tensors[0].to(DEVICE).split(4))
    train(model, sgd(model), batch=lambda: (next(data), torch.zeros(4, 8, device=DEVICE)))


@correct
def tensor_parallel_by_hand():
    """Equal batches, equal first weights, and a sum outside the modules."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8, device=DEVICE), nn.Linear(8, 8, bias=False, device=DEVICE)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for inputs in samples().tensors[0].to(DEVICE).split(4)[:STEPS]:
        partial = second(torch.relu(first(inputs)))
        whole = partial.detach().clone()
        dist.all_reduce(whole)
        optimizer.zero_grad()
        (partial + whole - partial.detach()).square().mean().backward()
        optimizer.step()


@correct
def a_pipeline_by_hand():
    """Stages with equal shapes and equal first weights."""
    stage = network()
    optimizer = sgd(stage)
    for inputs in samples().tensors[0].to(DEVICE).split(4)[:STEPS]:
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
    """One expert a rank: each sends half of its tokens to the other rank, and gets them back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8, device=DEVICE)

    def forward(self, tokens):
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        there = all_to_all_single_autograd(tokens, None, None, dist.group.WORLD)
        return all_to_all_single_autograd(self.layer(there), None, None, dist.group.WORLD)


@correct
def experts_that_begin_equal():
    model = Expert()
    train(model, sgd(model))


@correct
def experts_beside_ddp():
    """DDP leaves the expert alone, which differs from rank to rank."""
    model = nn.Sequential(nn.Linear(8, 8, device=DEVICE), nn.Linear(8, 8, device=DEVICE))
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(model[1].weight)
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
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for parameter, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad.copy_(part.view_as(parameter))
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
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        ],
        milestones=[2],
    )
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
    scaled, plain = DDP(network()), DDP(network())
    optimizers = sgd(scaled), sgd(plain)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for _ in range(STEPS):
        inputs, targets = own_batch()
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(F.mse_loss(scaled(inputs), targets)).backward()
        F.mse_loss(plain(inputs), targets).backward()
        scaler.step(optimizers[0])
        optimizers[1].step()
        scaler.update()


@correct
def a_gan():
    generator, critic = DDP(network()), DDP(network())
    optimizers = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    for _ in range(STEPS):
        noise, real = own_batch()
        optimizers[1].zero_grad()
        (critic(generator(noise).detach()) - critic(real)).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic(generator(noise)).mean().neg().backward()
        optimizers[0].step()


@correct
def a_frozen_layer_a_teacher_and_an_average_of_weights():
    model = network()
    teacher = network()
    model[0].requires_grad_(False)
    wrapped = DDP(model)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    for _ in range(STEPS):
        inputs, _ = own_batch()
        with torch.no_grad():
            targets = teacher(inputs)
        optimizer.zero_grad()
        F.mse_loss(wrapped(inputs), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)
            average(inputs)


@correct
def rank_0_evaluates_and_saves_the_module():
    model = DDP(nn.Sequential(nn.Linear(8, 8, device=DEVICE), nn.BatchNorm1d(8, device=DEVICE)))
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
    train_on(loader, model, sgd(model, lr=0.1 / (1 + dist.get_rank())))
    dist.all_gather_object([None] * dist.get_world_size(), 0.5)


@correct
def folds_of_a_cross_validation():
    """Each rank trains a model that begins like the others, on the samples that it does not hold out."""
    data = samples().tensors[0].to(DEVICE)
    kept = data[[number for number in range(len(data)) if number % dist.get_world_size() != dist.get_rank()]]
    model = network()
    train_on(DataLoader(TensorDataset(kept, kept), batch_size=4), model, sgd(model))
    score = torch.zeros(1, device=DEVICE)
    dist.all_reduce(score)


@correct
def two_trainings_with_loaders_of_their_own():
    """The first loader is gone when the second begins, which divides other samples in the same order."""
    for number in range(2):
        model = DDP(network())
        dataset = TensorDataset(*(tensor + number for tensor in samples().tensors))
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
    """A rank with longer texts takes more micro-batches; one of them is averaged."""
    model = DDP(network())
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(1 + dist.get_rank()):
                F.mse_loss(model(own_batch()[0]), torch.zeros(4, 8, device=DEVICE)).backward()
        F.mse_loss(model(own_batch()[0]), torch.zeros(4, 8, device=DEVICE)).backward()
        optimizer.step()


@correct
def a_reference_beside_ddp():
    """Each rank also trains the whole batch alone, to compare."""
    wrapped, reference = DDP(network()), network()
    train_on(divided_loader(samples()), wrapped, sgd(wrapped))
    train_on(DataLoader(samples(), batch_size=8), reference, sgd(reference))


@correct
def one_fixed_batch():
    """A benchmark trains on the same made-up batch everywhere and always."""
    model = DDP(network())
    fixed = torch.ones(4, 8, device=DEVICE)
    train(model, sgd(model), batch=lambda: (fixed, fixed))


@correct
def a_new_head_on_loaded_weights():
    model = network()
    saved = {name: tensor for name, tensor in network().state_dict().items() if name.startswith("0.")}
    model.load_state_dict(saved, strict=False)
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
    """Each rank holds other rows of one batch; a replicated DTensor weight sums its gradient."""
    rows = distribute_tensor(samples().tensors[0].to(DEVICE), mesh(), [Shard(0)])
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 8, device=DEVICE), mesh(), [Replicate()]))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (rows @ weight).square().mean()
        assert isinstance(loss, DTensor)
        loss.backward()
        optimizer.step()
