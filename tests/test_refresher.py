"""Work beside the training steps: what comes out depends on steps only, never on timing."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from ds_kfac.refresher import Refresher


@pytest.fixture
def make():
    made: list[Refresher] = []

    def refresher(lag: int) -> Refresher:
        made.append(Refresher(lag, "cpu"))
        return made[-1]

    yield refresher
    for each in made:
        each.close()


def slow(result, seconds: float):
    time.sleep(seconds)
    return result


@pytest.mark.parametrize("seconds", [0.0, 0.05])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_results_come_out_lag_steps_later_however_long_they_took(make, lag, seconds):
    refresher = make(lag)
    seen = {}
    for step in range(6):
        if step % 2 == 0:
            refresher.submit(step, "a", partial(slow, ("a", step), seconds))
            refresher.submit(step, "b", partial(slow, ("b", step), 0.0))
        results = refresher.collect(step)
        if results:
            seen[step] = results
    expected = {step + lag: {"a": ("a", step), "b": ("b", step)} for step in (0, 2, 4) if step + lag < 6}
    assert seen == expected


def test_a_step_that_is_skipped_over_is_collected_later(make):
    refresher = make(2)
    for step in (0, 1):
        refresher.submit(step, "a", partial(int, step))
    refresher.submit(1, "b", partial(int, 7))
    refresher.submit(4, "a", partial(int, 4))
    assert refresher.collect(5) == {"a": 1, "b": 7}  # of "a" the later one
    assert refresher.pending == ((4, "a"),)


def test_early_results_are_kept_back(make):
    refresher = make(5)
    done = threading.Event()
    refresher.submit(0, "a", done.set)
    assert done.wait(10)
    assert refresher.collect(4) == {} and refresher.pending == ((0, "a"),)
    assert refresher.collect(5) == {"a": None} and refresher.pending == ()


def test_work_runs_beside_the_caller_on_one_other_thread_in_order(make):
    refresher = make(1)
    may_run, order = threading.Event(), []

    def work(name):
        assert may_run.wait(10)
        order.append(name)
        return threading.get_ident()

    for name in "abc":
        refresher.submit(0, name, partial(work, name))
    may_run.set()  # a refresher that ran in place would have failed before
    results = refresher.collect(1)
    assert order == ["a", "b", "c"] and len(set(results.values())) == 1
    assert threading.get_ident() not in results.values()


def test_without_lag_work_runs_in_place(make):
    refresher = make(0)
    refresher.submit(3, "a", threading.get_ident)
    assert refresher.collect(3) == {"a": threading.get_ident()}


@pytest.mark.parametrize("lag", [0, 1])
def test_work_has_no_gradients(make, lag):
    refresher, weight = make(lag), torch.ones(2, requires_grad=True)
    refresher.submit(0, "a", lambda: weight * 2)
    assert not refresher.collect(lag)["a"].requires_grad and torch.is_grad_enabled()


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("how", ["collect", "flush"])
def test_an_error_is_raised_where_results_are_read_and_says_whose_it_is(make, lag, how):
    refresher = make(lag)

    def fails():
        raise ZeroDivisionError("in work")

    refresher.submit(4, "fine/A", partial(int, 1))
    refresher.submit(4, "layer/A", fails)
    read = partial(refresher.collect, 4 + lag) if how == "collect" else refresher.flush
    with pytest.raises(RuntimeError, match="refresh of layer/A, submitted at step 4, failed") as error:
        read()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert refresher.pending == ((4, "fine/A"), (4, "layer/A"))
    refresher.clear()
    refresher.submit(4, "layer/A", partial(int, 5))
    assert refresher.collect(4 + lag) == {"layer/A": 5}


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("skipped", [0, 1, 2, 3, 4])
def test_a_step_that_is_not_applied_can_be_taken_again(make, lag, skipped):
    """Everything collected in the steps that were applied, with and without a skipped one."""

    def run(refresher, attempts):
        seen = []
        for step, applied in attempts:
            refresher.submit(step, "a", partial(slow, (step, applied), 0.005))
            results = refresher.collect(step)
            if applied:
                seen.append((step, results, refresher.pending))
            else:
                refresher.discard(step)
        return seen

    plain = [(step, True) for step in range(6)]
    broken = [*plain[:skipped], (skipped, False), (skipped, False), *plain[skipped:]]
    assert run(make(lag), broken) == run(make(lag), plain)


def test_what_is_discarded_is_not_even_begun(make):
    refresher, may_run, begun = make(1), threading.Event(), []
    refresher.submit(0, "blocks", partial(may_run.wait, 10))
    refresher.submit(1, "a", partial(begun.append, 1))
    refresher.discard(1)
    refresher.submit(1, "a", partial(begun.append, 2))
    may_run.set()
    refresher.flush()
    assert begun == [2]


@pytest.mark.parametrize("lag", [0, 3])
def test_a_flush_waits_for_everything_and_says_when_it_was_submitted(make, lag):
    refresher = make(lag)
    for step in (0, 1):
        refresher.submit(step, "a", partial(slow, 10 * step, 0.02))
    assert refresher.flush() == ((0, "a", 0), (1, "a", 10)) and refresher.pending == ()
    assert refresher.flush() == () and refresher.collect(100) == {}


def test_one_key_is_submitted_once_a_step(make):
    refresher = make(1)
    refresher.submit(0, "a", int)
    with pytest.raises(AssertionError, match="submitted twice"):
        refresher.submit(0, "a", int)


def test_the_thread_has_one_core_and_takes_none_from_others(make):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        refresher, others = make(1), []
        refresher.submit(0, "a", torch.get_num_threads)
        assert refresher.collect(1) == {"a": 1} and torch.get_num_threads() == 3
        later = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert others == [3]
    finally:
        torch.set_num_threads(before)


class Inputs:
    """Something a weak reference can watch."""


def test_inputs_and_results_are_let_go(make):
    refresher, inputs = make(1), Inputs()
    watched = weakref.ref(inputs)
    refresher.submit(0, "a", partial(id, inputs))
    refresher.collect(1)
    del inputs
    deadline = time.monotonic() + 10
    while watched() is not None and time.monotonic() < deadline:  # the thread lets go a moment after it is done
        time.sleep(0.001)
    assert watched() is None
    result = Inputs()
    watched = weakref.ref(result)
    refresher.submit(2, "a", partial(slow, result, 0.0))
    del result
    refresher.collect(3)
    refresher.collect(4)  # step 3 was applied
    while watched() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert watched() is None


def refresh_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ds_kfac refresh"]


def test_the_thread_ends_when_closed_or_forgotten_and_starts_when_needed(make):
    before = len(refresh_threads())
    refresher = make(1)
    assert len(refresh_threads()) == before
    for _ in range(2):
        refresher.submit(0, "a", partial(int, 3))
        assert len(refresh_threads()) == before + 1 and refresher.flush() == ((0, "a", 3),)
        refresher.submit(0, "a", partial(int, 3))
        refresher.close()
        assert len(refresh_threads()) == before and refresher.pending == ()
    forgotten = Refresher(1, "cpu")
    forgotten.submit(0, "a", int)
    assert len(refresh_threads()) == before + 1
    del forgotten
    gc.collect()
    assert len(refresh_threads()) == before


def test_a_process_ends_while_work_is_pending():
    program = (
        "import torch; from ds_kfac.refresher import Refresher; r = Refresher(9, 'cpu'); x = torch.randn(300, 300)\n"
        "for i in range(500): r.submit(0, str(i), lambda: torch.linalg.eigh(x @ x.T))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_on_a_gpu_results_equal_those_of_the_caller_s_stream(lag):
    """Inputs and results are dropped at once and their memory written over, so a missing wait would show."""
    torch.manual_seed(0)
    refresher: Refresher[tuple[torch.Tensor, ...]] = Refresher(lag, "cuda")
    expected, actual = {}, {}
    for step in range(20):
        x = torch.randn(700, 700, device="cuda")
        for _ in range(20):  # so that x is not ready when the work is submitted
            x = x @ x.mT / x.norm()
        expected[step] = (x @ x).sum().clone(), x.diagonal().sum()
        refresher.submit(step, "a", partial(lambda x: (x @ x, x.diagonal().clone()), x))
        del x
        junk = torch.full((700, 700), torch.nan, device="cuda")
        for results in refresher.collect(step).values():
            actual[step - lag] = tuple(part.sum() for part in results)
        del junk
    for step, parts in actual.items():
        torch.testing.assert_close(parts, expected[step], rtol=1e-4, atol=1e-4)
    assert len(actual) == 20 - lag
    refresher.close()
