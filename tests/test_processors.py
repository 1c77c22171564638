"""The short form of make processors: no comparison is near its bound when sums come in another
order."""

from tests import processors


def test_other_orders_of_sums_stay_below_the_limit(capsys):
    status = processors.main(["--only", "ATen default", "shuffled 1", "--", *processors.SHORT])
    told = capsys.readouterr().out
    print(told)
    assert status == 0, told
    assert told.count("compared") == 2 and "failed" not in told
