"""Bugs that are planted in chapter 11's script, one at a time: a check of test_trainer_workloads.py notices each."""

import pytest
import test_trainer_workloads as workloads

pytestmark = [pytest.mark.ranks, pytest.mark.daily, pytest.mark.timeout(600)]

RANKS = workloads.test_two_ranks_have_the_losses_of_one
MICRO = workloads.test_two_micro_batches_have_the_losses_of_one
WORKERS = workloads.test_workers_change_no_loss_and_the_printed_losses_are_the_true_ones
VALIDATION = workloads.test_a_validation_is_complete_and_true_on_1_2_and_3_ranks
STOPPED = workloads.test_a_stopped_run_ends_with_the_bits_of_an_undisturbed_one
TORN = workloads.test_a_truncated_checkpoint_is_named_and_the_one_before_it_is_taken
NAN = workloads.test_a_nan_leaves_no_checkpoint_that_is_not_finite
GROUPS = workloads.test_groups_keep_the_ratio_of_their_rates
LONG = workloads.test_a_signal_in_a_long_validation_or_save_is_heard_there
BUGS = {
    "each rank divides by its own count": ("ranks / number)", "ranks / totals[0, 1])", "masked_language", RANKS),
    "micro-batches are averaged by themselves": ("loss / args.batch_size)", "loss / sums[0, 1])", "lengths", MICRO),
    "DDP's division is forgotten": ("args.batch_size * ranks /", "args.batch_size /", "two_inputs", RANKS),
    "gradients stay on their rank": ("with nullcontext() if", "with nullcontext() if 0 >", "regression", RANKS),
    "a batch that cannot be divided loses samples": (
        "block[slot :: self.slots]",
        "block[: len(block) // self.slots * self.slots][slot :: self.slots]",
        "lengths",
        RANKS,
    ),
    "samples draw what was left": ('seed_all("sample", self.seed, epoch, index)', "pass", "masked_language", RANKS),
    "dropout depends on the past": ('seed_all("step", args', '("step", args', "regression", WORKERS),
    "a resumed run begins the data anew": ("if step >= skip:", "if True:", "low_rank", STOPPED),
    "a stream is shuffled apart": ('seed_all("order", self.seed, epoch)', "random.seed(os.getpid())", "stream", RANKS),
    "what is between two samples of a stream disturbs it": (
        'seed_all("stream", self.seed, epoch, number)',
        "pass",
        "stream",
        WORKERS,
    ),
    "a stopped job's workers end": (
        "signal.SIG_BLOCK, StopRequest.signals",
        "signal.SIG_BLOCK, ()",
        "batch_norm",
        STOPPED,
    ),
    "the schedule begins anew": (
        "(step - 1 - args.warmup)",
        "(steps.index(step) - args.warmup)",
        "regression",
        STOPPED,
    ),
    "one rate for all groups": ('group["lr"] = peak * factor', 'group["lr"] = peaks[0] * factor', "low_rank", GROUPS),
    "the optimizer is not saved": ('"model": model, "optimizer": optimizer,', '"model": model,', "batch_norm", STOPPED),
    "a nan is stepped": ("scaler.step(optimizer)", "optimizer.step()", "low_rank", NAN),
    "BatchNorm keeps a nan": ("torch.where(norm.isfinite(), buffer, before)", "buffer", "batch_norm", NAN),
    "a validation leaves out its rest": ("if len(block) >= self.least > 0:", "if False:", "regression", VALIDATION),
    "each rank judges its own BatchNorm": ("dist.broadcast(buffer, src=0)", "pass", "batch_norm", VALIDATION),
    "metrics are of one rank": ("dist.all_reduce(totals)", "pass", "lengths", WORKERS),
    "a line's sums are not forgotten": (
        "tell(module.means(totals) | values)\n            totals, line, start, other = 0,",
        "tell(module.means(totals) | values)\n            _, line, start, other = 0,",
        "regression",
        WORKERS,
    ),
    "a damaged file ends the job": ("except Exception as error:", "except KeyError as error:", "low_rank", TORN),
    "a validation hears no signal": ("if stop.agreed():\n            break", "stop.agreed()", "regression", LONG),
    "a signal in a save is heard late": ("stopping = stop.agreed() or stop.agreed()", "pass", "regression", LONG),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(name, tmp_path):
    old, new, workload, check = BUGS[name]
    project = workloads.with_bug(workloads.Project, workload, tmp_path, old, new)
    with pytest.raises((AssertionError, ValueError)):
        check(project)
