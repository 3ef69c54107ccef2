"""A script for test_rehearsal of what public programs do: on GPUs all of it is right. It needs two GPUs."""

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
uninitialized = not torch.cuda.is_initialized()


def a_mesh_sets_the_gpu():
    assert uninitialized
    mesh = init_device_mesh("cuda", (2,))  # it also makes the default group, with no word on the backend
    assert torch.cuda.current_device() == rank and torch.cuda.is_initialized()
    assert distribute_tensor(torch.ones(4), mesh, [Shard(0)]).device == device


def the_default_backend_is_nccl():
    try:
        dist.all_reduce(torch.ones(4, 4, device=device).t()[:, 1:])
    except ValueError as error:
        assert "contiguous" in str(error)
    else:
        raise AssertionError("NCCL accepted a tensor that is not contiguous")
    assert isinstance(dist.group.WORLD._get_backend(device), dist.ProcessGroupNCCL)
    assert torch.get_device_module() is torch.cuda


def fsdp_without_a_mesh_is_on_gpus():
    model = fully_shard(nn.Linear(4, 4))
    assert model.weight.device_mesh.device_type == "cuda" and model.weight.device == device
    model(torch.ones(2, 4, device=device)).sum().backward()
    assert model.weight.grad.device == device


def autocast_of_torch_cuda_amp():
    layer, x = nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)
    with torch.cuda.amp.autocast():
        assert layer(x).dtype == torch.float16 and torch.is_autocast_enabled()
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.cuda.amp.autocast(enabled=False):
        assert layer(x).dtype == torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert torch.cuda.amp.autocast()(layer.forward)(x).dtype == torch.float16
    assert not torch.is_autocast_enabled()


def causal_attention_with_dropout():
    query = torch.randn(2, 4, 8, 16, device=device, requires_grad=True)
    torch.manual_seed(0)
    values = nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5, is_causal=True)
    values.sum().backward()
    assert values.device == query.grad.device == device
    on_host = query.detach().cpu()
    torch.manual_seed(0)
    expected = nn.functional.scaled_dot_product_attention(on_host, on_host, on_host, dropout_p=0.5, is_causal=True)
    assert torch.equal(values.cpu(), expected)


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


def a_dtensor_like_another_on_the_gpu():
    with torch.device("meta"):
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cuda", (2,)))
    like = torch.empty_like(model.weight, device="cuda")
    assert isinstance(like, DTensor) and like.device == device and like.shape == (4, 4)
    model.to_empty(device="cuda")
    assert isinstance(model.weight, DTensor) and model.weight.to_local().device == device
    assert torch.zeros_like(torch.ones(2, device="meta"), device="cuda").tolist() == [0, 0]


def scripts_and_zero():
    @torch.jit.script
    def scale(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) + torch.ones(2) * x

    @torch.jit.script
    def ramp(count: int, place: torch.device) -> torch.Tensor:
        return torch.arange(count, device=place)

    assert scale(torch.ones(2)).tolist() == [1, 1] and ramp(2, torch.device("cpu")).tolist() == [0, 1]
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(4, 4).to(device)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()


def nccl_counts_elements():
    def zeros(*shape):
        return torch.zeros(shape, device=device)

    mine = zeros(1 + rank) + rank
    scalars = [zeros(1), zeros(1)]
    dist.all_gather(scalars, torch.tensor(float(rank), device=device))
    assert torch.cat(scalars).tolist() == [0, 1]
    stack = zeros(2, 3)
    dist.all_gather_into_tensor(stack, zeros(3) + rank)
    assert stack.tolist() == [[0] * 3, [1] * 3]
    unequal = [zeros(1), zeros(2)]
    dist.all_gather(unequal, mine)
    assert [part.tolist() for part in unequal] == [[0], [1, 1]]
    received = [torch.empty_like(mine), torch.empty_like(mine)]
    dist.all_to_all(received, [zeros(1) + rank, zeros(2) + rank])
    assert [part.tolist() for part in received] == [[0] * (1 + rank), [1] * (1 + rank)]
    reshaped = zeros(2, 2)
    dist.reduce_scatter_tensor(reshaped, zeros(8) + 1)
    dist.broadcast(zeros(4) if rank else reshaped, 0)
    assert reshaped.tolist() == [[2, 2], [2, 2]]


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


def random_numbers_of_dtensors():
    mesh = init_device_mesh("cuda", (2,))

    def draw_shards():
        return nn.init.normal_(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))

    torch.manual_seed(rank)  # DTensor makes the ranks' seeds on GPUs equal
    state_of_host = torch.get_rng_state()
    assert len(draw_shards().full_tensor().unique()) == 16  # each shard has numbers of its own

    replicas = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    own = nn.functional.dropout(replicas).to_local()
    of_rank_0 = own.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(own, of_rank_0)
    assert torch.equal(torch.get_rng_state(), state_of_host)

    torch.manual_seed(0)
    first = draw_shards().to_local()
    state = torch.cuda.get_rng_state()
    second = draw_shards().to_local()
    torch.cuda.set_rng_state(state)
    second_again = draw_shards().to_local()
    assert torch.equal(second_again, second)
    assert not torch.equal(second_again, first)


def attention_of_dtensors():
    mesh = init_device_mesh("cuda", (2,))
    whole = [torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(part)) for part in range(3)]
    whole = [part.to(device).requires_grad_() for part in whole]
    plain = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    plain.square().sum().backward()
    for dim in (0, 1):  # sequences, then heads
        parts = [distribute_tensor(part.detach(), mesh, [Shard(dim)]).requires_grad_() for part in whole]
        out = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        out.square().sum().backward()
        assert out.placements == (Shard(dim),)
        assert torch.equal(out.full_tensor(), plain)
        for part, full in zip(parts, whole, strict=True):
            assert torch.equal(part.grad.full_tensor(), full.grad)


def flex_attention_with_a_mask():
    mask = create_block_mask(lambda batch, head, row, column: row >= column, None, None, 128, 128, device="cuda")
    parts = [torch.randn(1, 2, 128, 16, device=device, requires_grad=True) for _ in range(3)]
    causal = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
    causal.sum().backward()
    grads = [part.grad.clone() for part in parts]
    for part in parts:
        part.grad = None
    masked = flex_attention(*parts, block_mask=mask)
    masked.sum().backward()
    assert masked.device == device and torch.allclose(masked, causal, atol=1e-5)
    assert all(torch.allclose(part.grad, grad, atol=1e-4) for part, grad in zip(parts, grads, strict=True))


def modules_move_there_and_back():
    for norm in (nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm):
        layer = norm(nn.Linear(4, 4)).cuda()
        layer(torch.ones(2, 4, device=device)).sum().backward()
        assert layer.cpu()(torch.ones(2, 4)).device.type == "cpu"
        assert layer.to(device)(torch.ones(2, 4, device=device)).device == device
    layer = nn.Linear(4, 4)
    layer.weight.data = layer.weight.data.cuda()
    layer.bias.data = layer.bias.data.cuda()
    layer(torch.ones(2, 4, device=device)).sum().backward()
    layer.weight.data = layer.weight.data.cpu()
    assert layer.weight.device.type == "cpu"
    assert layer.bias.grad.device == device


def batch_norm_over_all_ranks():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 3, 2, generator=generator).requires_grad_()
    one_process = nn.BatchNorm1d(3)
    one_process(whole).pow(3).sum().backward()

    part = whole.detach()[rank::2].to(device).requires_grad_()
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)).to(device)
    synchronized(part).pow(3).sum().backward()

    assert torch.allclose(synchronized(part).cpu(), one_process(whole)[rank::2], atol=1e-5)
    assert torch.allclose(part.grad.cpu(), whole.grad[rank::2], atol=1e-4)
    dist.all_reduce(synchronized.weight.grad)
    assert torch.allclose(synchronized.weight.grad.cpu(), one_process.weight.grad, atol=1e-4)
    assert torch.allclose(synchronized.running_var.cpu(), one_process.running_var, atol=1e-5)


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


def a_model_moves_while_ddp_holds_it():
    ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    batch = torch.arange(8.0).view(2, 4) + rank
    ddp(batch.to(device)).square().sum().backward()
    optimizer.step()
    weight = ddp.module[0].weight
    before = weight.tolist()
    model = ddp.module.cpu()
    assert model[0].weight is weight and weight.device.type == "cpu" and not weight.is_cuda
    assert weight.grad.device.type == "cpu" and weight.tolist() == before and weight.detach().numpy().shape == (4, 4)
    assert model(batch).device.type == "cpu" and pickle.loads(pickle.dumps(weight)).device.type == "cpu"
    ddp.to(device)
    optimizer.zero_grad()
    ddp(batch.to(device)).square().sum().backward()
    optimizer.step()
    assert weight.device == weight.grad.device == device and weight.tolist() != before


def a_sharded_model_moves_there_and_back():
    model = fully_shard(nn.Linear(4, 4))
    before = model.weight.full_tensor().tolist()
    model.to("cpu")
    assert model.weight.to_local().device.type == model.weight.device.type == "cpu"
    model.cuda()
    assert model.weight.to_local().device == device and model.weight.full_tensor().tolist() == before
    copied = model.weight.cpu()
    copied.to_local().sum().backward()
    assert copied.device.type == "cpu" and model.weight.grad.device == device


def offloaded_parameters_must_stay_on_the_host():
    model = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model.to("cuda")
    try:
        model(torch.ones(2, 4, device=device))
    except RuntimeError as error:
        assert "materialized on CPU" in str(error)
    else:
        raise AssertionError("FSDP accepted parameters on the GPU under CPUOffloadPolicy")


def a_sharded_model_from_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    for part in (*model, model):
        fully_shard(part)
    try:
        model.to("cuda")
    except NotImplementedError as error:
        assert "to_empty()" in str(error)
    model.to_empty(device="cuda")
    for part in model:
        part.reset_parameters()
    assert 0 < model[0].weight.full_tensor().abs().max() <= 0.5
    model(torch.ones(2, 4, device=device)).sum().backward()


programs = [
    a_mesh_sets_the_gpu,
    the_default_backend_is_nccl,
    fsdp_without_a_mesh_is_on_gpus,
    autocast_of_torch_cuda_amp,
    a_number_is_a_device,
    a_dtensor_like_another_on_the_gpu,
    scripts_and_zero,
    nccl_counts_elements,
    every_call_has_a_future,
    random_numbers_of_dtensors,
    attention_of_dtensors,
    flex_attention_with_a_mask,
    modules_move_there_and_back,
    batch_norm_over_all_ranks,
    old_constructors,
    a_model_moves_while_ddp_holds_it,
    a_sharded_model_moves_there_and_back,
    offloaded_parameters_must_stay_on_the_host,
    a_sharded_model_from_the_meta_device,
]
for program in programs:
    try:
        program()
        verdict = "right"
    except Exception as error:
        verdict = f"{type(error).__name__}: {error} in"
    print(f"{verdict} {program.__name__} on {rank}\n", end="", flush=True)
dist.destroy_process_group()
