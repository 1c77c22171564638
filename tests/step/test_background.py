"""Asynchronous work: what comes out depends on steps only, never on timing."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from ds_kfac.step.decompose import Refresher
from tests.close import close


@pytest.fixture
def refresher():
    made: Refresher = Refresher("cpu")
    yield made
    made.close()


def submit(refresher: Refresher, key: str, work) -> None:
    refresher.submit([key], lambda: [work()])


def slow(result, seconds: float):
    time.sleep(seconds)
    return result


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_result_is_that_of_its_key_however_long_it_took(refresher, seconds):
    submit(refresher, "a", partial(slow, 1, seconds))
    submit(refresher, "b", partial(slow, 2, 0.0))
    assert refresher.result("b") == 2 and refresher.result("a") == 1


def test_a_result_stays_until_it_is_dropped(refresher):
    """A step that is not applied asks again."""
    made = []

    def work():
        made.append(len(made))
        return made[-1]

    submit(refresher, "a", work)
    assert [refresher.result("a") for _ in range(3)] == [0, 0, 0] and list(refresher.jobs) == ["a"]
    refresher.drop(["a"])
    assert not refresher.jobs
    with pytest.raises(KeyError):
        refresher.result("a")
    submit(refresher, "a", work)
    assert refresher.result("a") == 1


def test_early_results_wait_to_be_asked_for(refresher):
    done = threading.Event()
    submit(refresher, "a", done.set)
    assert done.wait(10)
    assert list(refresher.jobs) == ["a"] and refresher.result("a") is None


def test_work_runs_next_to_the_caller_on_one_other_thread_in_order(refresher):
    may_run, order = threading.Event(), []

    def work(name):
        assert may_run.wait(10)
        order.append(name)
        return threading.get_ident()

    for name in "cab":
        submit(refresher, name, partial(work, name))
    assert list(refresher.jobs) == ["c", "a", "b"] and order == []
    may_run.set()  # a refresher that ran in place would have failed before
    results = {refresher.result(name) for name in "bca"}
    assert order == ["c", "a", "b"] and len(results) == 1 and threading.get_ident() not in results


def test_work_has_no_gradients(refresher):
    weight = torch.ones(2, requires_grad=True)
    submit(refresher, "a", lambda: weight * 2)
    assert not refresher.result("a").requires_grad and torch.is_grad_enabled()


def test_an_error_is_raised_where_the_result_is_read_and_says_whose_it_is(refresher):
    def fails():
        raise ZeroDivisionError("in work")

    submit(refresher, "layer/A", fails)
    submit(refresher, "fine/A", partial(int, 1))
    assert refresher.result("fine/A") == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refresh of layer/A failed") as error:
            refresher.result("layer/A")
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    refresher.drop(["layer/A"])
    submit(refresher, "layer/A", partial(int, 5))
    assert refresher.result("layer/A") == 5


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("skipped", [0, 1, 2, 3, 4])
def test_a_step_that_is_not_applied_can_be_taken_again(lag, skipped):
    """Everything collected in the steps that were applied, with and without a step that was tried twice in vain."""

    def run(attempts):
        refresher, due, seen = Refresher("cpu"), {}, []
        for step, applied in attempts:
            key, begun = f"a{step}", step % 2 == 0
            if begun:
                submit(refresher, key, partial(slow, (step, applied), 0.005))
            results = {name: refresher.result(name) for name, at in due.items() if at == step}
            if applied:
                due |= {key: step + lag} if begun else {}
                refresher.drop(results)
                seen.append((step, results, list(refresher.jobs)))
            elif begun:
                refresher.drop([key])
        refresher.close()
        return seen

    plain = [(step, True) for step in range(6)]
    broken = [*plain[:skipped], (skipped, False), (skipped, False), *plain[skipped:]]
    expected = run(plain)
    assert run(broken) == expected and any(results for _, results, _ in expected)


@pytest.mark.parametrize("how", ["drop", "clear"])
def test_what_is_dropped_is_not_even_begun(refresher, how):
    may_run, begun = threading.Event(), []
    submit(refresher, "blocks", partial(may_run.wait, 10))
    submit(refresher, "a", partial(begun.append, 1))
    refresher.drop(["a", "never submitted"]) if how == "drop" else refresher.clear()
    submit(refresher, "a", partial(begun.append, 2))
    may_run.set()
    refresher.result("a")
    assert begun == [2]


def test_a_given_result_is_like_one_that_was_worked_out(refresher):
    """As after loading a checkpoint; no thread is needed for it."""
    before = len(refresh_threads())
    refresher.give("a", 3)
    assert list(refresher.jobs) == ["a"] and refresher.result("a") == 3 and len(refresh_threads()) == before
    with pytest.raises(AssertionError, match="a is submitted twice"):
        submit(refresher, "a", int)
    refresher.drop(["a"])
    submit(refresher, "a", partial(int, 4))
    assert refresher.result("a") == 4


def test_one_key_is_submitted_once(refresher):
    submit(refresher, "a", int)
    with pytest.raises(AssertionError, match="a is submitted twice"):
        submit(refresher, "a", int)


def test_the_thread_has_one_core_and_takes_none_from_others(refresher):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        others = []
        submit(refresher, "a", torch.get_num_threads)
        assert refresher.result("a") == 1 and torch.get_num_threads() == 3
        later = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert others == [3]
    finally:
        torch.set_num_threads(before)


class Inputs:
    """Something a weak reference can watch."""


def gone(watched: weakref.ref) -> bool:
    """The thread lets go a moment after it is done."""
    deadline = time.monotonic() + 10
    while watched() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return watched() is None


def test_inputs_and_results_are_let_go_once_dropped(refresher):
    inputs, result = Inputs(), Inputs()
    watched = [weakref.ref(inputs), weakref.ref(result)]
    submit(refresher, "a", partial(lambda x, y: y, inputs, result))
    del inputs, result
    assert refresher.result("a") is watched[1]() is not None
    refresher.drop(["a"])
    assert gone(watched[0]) and gone(watched[1])


def refresh_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ds_kfac refresh"]


def test_the_thread_ends_when_closed_or_forgotten_and_starts_when_needed(refresher):
    before = len(refresh_threads())
    for _ in range(2):
        submit(refresher, "a", partial(int, 3))
        assert len(refresh_threads()) == before + 1 and refresher.result("a") == 3
        submit(refresher, "b", partial(int, 3))
        refresher.close()
        assert len(refresh_threads()) == before and not refresher.jobs
    forgotten: Refresher = Refresher("cpu")
    submit(forgotten, "a", int)
    assert len(refresh_threads()) == before + 1
    del forgotten
    gc.collect()
    assert len(refresh_threads()) == before


def test_a_process_ends_while_work_is_pending():
    program = (
        "import torch; from ds_kfac.step.decompose import Refresher; r = Refresher('cpu'); x = torch.randn(300, 300)\n"
        "for i in range(500): r.submit([str(i)], lambda: [torch.linalg.eigh(x @ x.T)])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    ours = [line for line in result.stderr.splitlines() if "No CUDA runtime" not in line]  # of torch's CUDA builds
    assert (result.returncode, ours) == (0, [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_on_a_gpu_results_equal_those_of_the_caller_s_stream(lag):
    """Inputs and results are dropped at once and their memory written over, so a missing wait would show."""
    torch.manual_seed(0)
    refresher: Refresher = Refresher("cuda")
    expected, actual = {}, {}
    for step in range(20):
        x = torch.randn(700, 700, device="cuda")
        for _ in range(20):  # so that x is not ready when the work is submitted
            x = x @ x.mT / x.norm()
        expected[step] = (x @ x).sum().clone(), x.diagonal().sum()
        submit(refresher, str(step), partial(lambda x: (x @ x, x.diagonal().clone()), x))
        del x
        junk = torch.full((700, 700), torch.nan, device="cuda")
        if step >= lag:
            results = refresher.result(str(step - lag))
            actual[step - lag] = tuple(part.sum() for part in results)
            refresher.drop([str(step - lag)])
            del results
        del junk
    for step, parts in actual.items():
        close(parts, expected[step], sums=700**2, scale=700.0)
    assert len(actual) == 20 - lag
    refresher.close()
