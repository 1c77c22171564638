"""build + forward of tiny models"""

import re
import sys
import time
import traceback

from benchmarks.coverage.architectures import architectures
from benchmarks.distributed.ranks import SERVER, on_ranks


def tried(row):
    import torch

    from benchmarks.coverage.batches import batch_of, loss_of
    from benchmarks.coverage.tiny import tiny

    try:
        torch.manual_seed(0)
        b = time.time()
        m = tiny(row)
        n = sum(p.numel() for p in m.parameters())
        big = max((p.numel(), k) for k, p in m.named_parameters())
        t1 = time.time() - b
        b = time.time()
        l = loss_of(m.train()(**batch_of(row, m)))
        l.backward()
        return f"ok {n:,} {float(l):.3f} {t1:.1f} {time.time() - b:.1f} {big}"
    except Exception as e:
        t = traceback.extract_tb(e.__traceback__)[-3:]
        return (
            "FAIL "
            + repr(e)[:330]
            + " @ "
            + " < ".join(f"{f.filename.split('/')[-1]}:{f.lineno}:{(f.line or '')[:80]}" for f in reversed(t))
        )


if __name__ == "__main__":
    SERVER.set_forkserver_preload(["benchmarks.coverage.preload"])
    for r in architectures().values():
        if re.search(sys.argv[1], r.name) and (len(sys.argv) < 3 or r.task == sys.argv[2]):
            try:
                out = on_ranks(tried, 1, r, timeout=60)[0]
            except RuntimeError as e:
                out = "FAIL " + str(e)
            print(r.task, r.name, out, flush=True)
