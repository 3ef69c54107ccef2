"""A script for test_rehearsal of what public programs do: on GPUs all of it is right. It needs two GPUs.

Each function that ``program`` marks does one such thing, and asserts what it would see on real GPUs.
"""

import os
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
programs = []


def program(function):
    """A decorator: the script runs this function, in the order of the file."""
    programs.append(function)
    return function


@program
def a_mesh_sets_the_gpu():
    assert not torch.cuda.is_initialized()  # this program is the first one
    mesh = init_device_mesh("cuda", (2,))  # also makes the default process group, for which nobody names a backend
    assert torch.cuda.is_initialized()
    assert torch.cuda.current_device() == rank
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert sharded.device == device


@program
def the_default_backend_is_nccl():
    matrix = torch.ones(4, 4, device=device)
    not_contiguous = matrix.t()[:, 1:]
    try:
        dist.all_reduce(not_contiguous)
    except ValueError as error:
        assert "contiguous" in str(error)
    else:
        raise AssertionError("NCCL accepted a tensor that is not contiguous")
    assert isinstance(dist.group.WORLD._get_backend(device), dist.ProcessGroupNCCL)
    assert torch.get_device_module() is torch.cuda


@program
def fsdp_without_a_mesh_is_on_gpus():
    model = fully_shard(nn.Linear(4, 4))
    assert model.weight.device_mesh.device_type == "cuda"
    assert model.weight.device == device
    model(torch.ones(2, 4, device=device)).sum().backward()
    assert model.weight.grad.device == device


@program
def autocast_of_torch_cuda_amp():
    layer = nn.Linear(4, 4).to(device)
    x = torch.ones(2, 4, device=device)

    with torch.cuda.amp.autocast():
        assert torch.is_autocast_enabled()
        assert layer(x).dtype == torch.float16
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.cuda.amp.autocast(enabled=False):
        assert layer(x).dtype == torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16

    forward_in_autocast = torch.cuda.amp.autocast()(layer.forward)  # as a decorator
    assert forward_in_autocast(x).dtype == torch.float16
    assert not torch.is_autocast_enabled()


@program
def causal_attention_with_dropout():
    query = torch.randn(2, 4, 8, 16, device=device, requires_grad=True)
    query_on_cpu = query.detach().cpu()

    def attention(query):
        torch.manual_seed(0)  # so that both calls drop the same elements
        return nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5, is_causal=True)

    output = attention(query)
    output.sum().backward()
    assert output.device == device
    assert query.grad.device == device
    assert torch.equal(output.cpu(), attention(query_on_cpu))


@program
def a_number_is_a_device():
    assert torch.device(rank) == device
    assert torch.device(device) == device
    assert torch.device(device=1) == torch.device("cuda:1")
    assert torch.device(index=1, type="cuda") == torch.device("cuda:1")
    assert pickle.loads(pickle.dumps(torch.device(1))) == torch.device("cuda:1")

    assert isinstance(torch.device(rank), torch.device)
    assert type(device) == torch.device  # noqa: E721
    assert torch.device in {type(device): "a place"}

    with torch.device(rank):
        assert torch.ones(2).device == device
    model = DDP(nn.Linear(4, 4).to(rank), device_ids=[rank])
    assert model.module.weight.device == device
    assert model(torch.ones(2, 4).to(rank)).device == device
    assert nn.Linear(2, 2).to(device=rank, dtype=torch.half).weight.dtype == torch.half
    assert nn.Linear(2, 2).to(torch.device(rank)).weight.device == device


@program
def a_dtensor_like_another_on_the_gpu():
    mesh = init_device_mesh("cuda", (2,))
    with torch.device("meta"):
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)

    like = torch.empty_like(model.weight, device="cuda")
    assert isinstance(like, DTensor)
    assert like.device == device
    assert like.shape == (4, 4)

    model.to_empty(device="cuda")
    assert isinstance(model.weight, DTensor)
    assert model.weight.to_local().device == device

    on_meta_device = torch.ones(2, device="meta")
    zeros = torch.zeros_like(on_meta_device, device="cuda")
    assert zeros.tolist() == [0, 0]


@program
def functions_compiled_by_torch_jit_script():
    @torch.jit.script
    def scale(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) + torch.ones(2) * x

    @torch.jit.script
    def ramp(count: int, place: torch.device) -> torch.Tensor:
        return torch.arange(count, device=place)

    assert scale(torch.ones(2)).tolist() == [1, 1]
    assert ramp(2, torch.device("cpu")).tolist() == [0, 1]


@program
def an_optimizer_that_shards_its_state():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(4, 4).to(device)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()


@program
def nccl_counts_elements():
    """Each collective gets tensors whose shapes differ from those that gloo would ask for. NCCL accepts them."""

    def zeros(*shape):
        return torch.zeros(shape, device=device)

    # The input of an all_gather has no dimension, and its outputs have one.
    gathered = [zeros(1), zeros(1)]
    dist.all_gather(gathered, torch.tensor(float(rank), device=device))
    assert torch.cat(gathered).tolist() == [0, 1]

    # The output of an all_gather_into_tensor has the ranks as a dimension of its own.
    gathered_rows = zeros(2, 3)
    dist.all_gather_into_tensor(gathered_rows, zeros(3) + rank)
    assert gathered_rows.tolist() == [[0, 0, 0], [1, 1, 1]]

    # Rank 0 gives one element to an all_gather, and rank 1 gives two.
    own_numbers = zeros(1 + rank) + rank
    gathered = [zeros(1), zeros(2)]
    dist.all_gather(gathered, own_numbers)
    assert gathered[0].tolist() == [0]
    assert gathered[1].tolist() == [1, 1]

    # Each rank sends one element to rank 0 and two to rank 1.
    received = [zeros(1 + rank), zeros(1 + rank)]
    sent = [zeros(1) + rank, zeros(2) + rank]
    dist.all_to_all(received, sent)
    assert received[0].tolist() == [0] * (1 + rank)
    assert received[1].tolist() == [1] * (1 + rank)

    # The eight elements of a reduce_scatter's input make four elements in two rows on each rank.
    summed = zeros(2, 2)
    dist.reduce_scatter_tensor(summed, zeros(8) + 1)
    assert summed.tolist() == [[2, 2], [2, 2]]

    # Rank 0 broadcasts two rows of two elements, and rank 1 receives them in one row of four.
    if rank == 0:
        dist.broadcast(zeros(2, 2) + 3, 0)
    else:
        row = zeros(4)
        dist.broadcast(row, 0)
        assert row.tolist() == [3, 3, 3, 3]


@program
def every_call_has_a_future():
    part = torch.zeros(2, device=device)
    scattered = dist.reduce_scatter_tensor(part, torch.ones(4, device=device), async_op=True)
    assert scattered.get_future().wait() == [part]
    assert part.tolist() == [2, 2]

    reduced = dist.all_reduce(part, async_op=True)
    doubled = reduced.get_future().then(lambda future: future.value()[0] * 2).wait()
    assert part.tolist() == [4, 4]
    assert doubled.tolist() == [8, 8]
    assert doubled.device == device


@program
def random_numbers_of_shards_differ_and_those_of_replicas_are_equal():
    torch.manual_seed(rank)
    state_of_cpu = torch.get_rng_state()
    # The first random numbers of a DTensor make the seeds of the ranks' GPUs equal.
    all_numbers = draw_shards().full_tensor()
    assert len(all_numbers.unique()) == all_numbers.numel()

    mesh = init_device_mesh("cuda", (2,))
    replicas = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    own_replica = nn.functional.dropout(replicas).to_local()
    replica_of_rank_0 = own_replica.clone()
    dist.broadcast(replica_of_rank_0, 0)
    assert torch.equal(own_replica, replica_of_rank_0)
    assert torch.equal(torch.get_rng_state(), state_of_cpu)


@program
def random_numbers_of_dtensors_begin_again_with_the_gpus_state():
    torch.manual_seed(0)
    first = draw_shards().to_local()
    state = torch.cuda.get_rng_state()
    second = draw_shards().to_local()
    torch.cuda.set_rng_state(state)
    second_again = draw_shards().to_local()
    assert torch.equal(second_again, second)
    assert not torch.equal(second_again, first)


def draw_shards():
    """A DTensor of 4 x 4 normal random numbers, of which each of the two ranks holds two rows."""
    mesh = init_device_mesh("cuda", (2,))
    zeros = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])
    return nn.init.normal_(zeros)


@program
def attention_of_dtensors():
    """Attention of DTensors that are split by sequences or by heads equals the attention of plain tensors."""
    mesh = init_device_mesh("cuda", (2,))
    generator = torch.Generator().manual_seed(0)
    sequences, heads, tokens, width = 2, 4, 5, 8
    plain_inputs = []  # query, key and value
    for _ in range(3):
        values = torch.randn(sequences, heads, tokens, width, generator=generator)
        plain_inputs.append(values.to(device).requires_grad_())
    plain_output = nn.functional.scaled_dot_product_attention(*plain_inputs, is_causal=True)
    plain_output.square().sum().backward()

    for split_dimension in (0, 1):  # sequences, then heads
        placements = (Shard(split_dimension),)
        inputs = []
        for plain_input in plain_inputs:
            sharded = distribute_tensor(plain_input.detach(), mesh, placements)
            inputs.append(sharded.requires_grad_())
        output = nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        output.square().sum().backward()

        assert output.placements == placements
        assert torch.equal(output.full_tensor(), plain_output)
        for sharded, plain_input in zip(inputs, plain_inputs, strict=True):
            assert torch.equal(sharded.grad.full_tensor(), plain_input.grad)


@program
def flex_attention_with_a_mask():
    """flex_attention with a causal mask computes what causal attention does, and so does its backward pass."""

    def is_causal(batch, head, query_position, key_position):
        return query_position >= key_position

    tokens = 128
    mask = create_block_mask(is_causal, B=None, H=None, Q_LEN=tokens, KV_LEN=tokens, device="cuda")
    inputs = []  # query, key and value
    for _ in range(3):
        inputs.append(torch.randn(1, 2, tokens, 16, device=device, requires_grad=True))

    expected = nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    expected.sum().backward()
    expected_gradients = []
    for tensor in inputs:
        expected_gradients.append(tensor.grad)
        tensor.grad = None

    output = flex_attention(*inputs, block_mask=mask)
    output.sum().backward()
    assert output.device == device
    assert torch.allclose(output, expected, atol=1e-5)
    for tensor, expected_gradient in zip(inputs, expected_gradients, strict=True):
        assert torch.allclose(tensor.grad, expected_gradient, atol=1e-4)


@program
def modules_move_there_and_back():
    """Modules whose weight is computed from other parameters in each forward pass move to the GPU and back."""
    on_cpu = torch.ones(2, 4)
    on_gpu = on_cpu.to(device)
    for norm in (nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm):
        layer = norm(nn.Linear(4, 4))
        layer.cuda()
        layer(on_gpu).sum().backward()
        layer.cpu()
        assert layer(on_cpu).device.type == "cpu"
        layer.to(device)
        assert layer(on_gpu).device == device


@program
def parameters_move_by_their_data():
    layer = nn.Linear(4, 4)
    layer.weight.data = layer.weight.data.cuda()
    layer.bias.data = layer.bias.data.cuda()
    layer(torch.ones(2, 4, device=device)).sum().backward()
    layer.weight.data = layer.weight.data.cpu()
    assert layer.weight.device.type == "cpu"
    assert layer.bias.grad.device == device


@program
def batch_norm_over_all_ranks():
    """SyncBatchNorm of two halves of a batch computes what BatchNorm computes of the whole batch in one process."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(6, 3, 2, generator=generator).requires_grad_()
    one_process = nn.BatchNorm1d(3)
    one_process(batch).pow(3).sum().backward()

    own_rows = slice(rank, None, 2)  # every other row, from row 0 on rank 0 and from row 1 on rank 1
    own_batch = batch.detach()[own_rows].to(device).requires_grad_()
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)).to(device)
    synchronized(own_batch).pow(3).sum().backward()

    assert torch.allclose(synchronized(own_batch).cpu(), one_process(batch)[own_rows], atol=1e-5)
    assert torch.allclose(own_batch.grad.cpu(), batch.grad[own_rows], atol=1e-4)
    assert torch.allclose(synchronized.running_var.cpu(), one_process.running_var, atol=1e-5)
    gradient = synchronized.weight.grad
    dist.all_reduce(gradient)
    assert torch.allclose(gradient.cpu(), one_process.weight.grad, atol=1e-4)


@program
def old_constructors():
    gpu = torch.ones(2, device=device)
    host = torch.ones(2)

    assert gpu.new([1.0, 2.0]).tolist() == [1, 2]
    assert gpu.new([1.0]).device == device
    assert host.new([1.0]).device.type == "cpu"
    assert gpu.new(3).shape == (3,)
    assert gpu.new(2, 3).shape == (2, 3)
    assert gpu.new(3).device == device

    assert host.type_as(gpu).device == device
    assert gpu.type_as(host).device.type == "cpu"
    assert gpu.half().type_as(gpu).dtype == torch.float32
    assert gpu.type_as(gpu) is gpu


@program
def a_model_moves_while_ddp_holds_it():
    """A model under DDP moves to the CPU and back. Its parameters stay the objects that DDP and the optimizer hold."""
    ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    batch = torch.arange(8.0).view(2, 4) + rank

    def train_one_step():
        optimizer.zero_grad()
        ddp(batch.to(device)).square().sum().backward()
        optimizer.step()

    train_one_step()
    weight = ddp.module[0].weight
    values = weight.tolist()

    model = ddp.module.cpu()
    assert model[0].weight is weight
    assert weight.device.type == "cpu"
    assert not weight.is_cuda
    assert weight.grad.device.type == "cpu"
    assert weight.tolist() == values
    assert weight.detach().numpy().shape == (4, 4)
    unpickled = pickle.loads(pickle.dumps(weight))
    assert unpickled.device.type == "cpu"
    assert model(batch).device.type == "cpu"

    ddp.to(device)
    train_one_step()
    assert weight.device == device
    assert weight.grad.device == device
    assert weight.tolist() != values


@program
def a_sharded_model_moves_there_and_back():
    model = fully_shard(nn.Linear(4, 4))
    values = model.weight.full_tensor().tolist()

    model.to("cpu")
    assert model.weight.device.type == "cpu"
    assert model.weight.to_local().device.type == "cpu"
    model.cuda()
    assert model.weight.to_local().device == device
    assert model.weight.full_tensor().tolist() == values

    # A gradient comes back through a copy to where the weight is.
    copy_on_cpu = model.weight.cpu()
    assert copy_on_cpu.device.type == "cpu"
    copy_on_cpu.to_local().sum().backward()
    assert model.weight.grad.device == device


@program
def offloaded_parameters_must_stay_on_the_host():
    model = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model.to("cuda")
    try:
        model(torch.ones(2, 4, device=device))
    except RuntimeError as error:
        assert "materialized on CPU" in str(error)
    else:
        raise AssertionError("FSDP accepted parameters on the GPU under CPUOffloadPolicy")


@program
def a_sharded_model_from_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    linear, norm = model
    for module in (linear, norm, model):
        fully_shard(module)

    try:
        model.to("cuda")
    except NotImplementedError as error:
        assert "to_empty()" in str(error)
    else:
        raise AssertionError("a parameter without values moved to the GPU")
    model.to_empty(device="cuda")
    linear.reset_parameters()
    norm.reset_parameters()

    largest_weight = linear.weight.full_tensor().abs().max()
    assert 0 < largest_weight <= 0.5  # Linear draws its weights from -1/sqrt(4) to 1/sqrt(4), for 4 inputs
    model(torch.ones(2, 4, device=device)).sum().backward()


for run in programs:
    try:
        run()
        verdict = "right"
    except Exception as error:
        verdict = f"{type(error).__name__}: {error} in"
    print(f"{verdict} {run.__name__} on {rank}\n", end="", flush=True)
dist.destroy_process_group()
