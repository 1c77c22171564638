"""Every C++ op on odd sizes; run under sanitizers by test_backends.py. Ends with an access that they must catch."""

import ctypes
import os

import torch

from ds_kfac.ops import cpp
from ds_kfac.ops.cpp_library import integers, library, pointers
from ds_kfac.ops.reference import packed_numel

DIMS = [1, 2, 33, 129, 300]


def main() -> None:
    torch.set_num_threads(2)
    matrices = [torch.randn(dim, dim) for dim in DIMS]
    starts, end = [], 0
    for dim in DIMS:
        starts.append(end)
        end += packed_numel(dim)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        packed = torch.empty(end, dtype=dtype)
        cpp.symmetric_pack_into_(packed, starts, matrices)
        for mirror in (True, False):
            cpp.symmetric_unpack_from(packed, starts, DIMS, mirror=mirror)
    sums = [torch.randn(packed_numel(dim)) for dim in DIMS]
    ones = [torch.ones(()) for _ in DIMS]
    cpp.ema_update_([x.clone() for x in sums], sums, ones, ones, [0.9] * len(DIMS))
    cpp.similarity(sums, sums, sums, DIMS)
    cpp.similarity([torch.randn(3 * packed_numel(7) + 3)] * 2, *[[torch.zeros(87)] * 2] * 2, [23] * 2, [7] * 2)
    for dim, total in zip(DIMS, sums, strict=True):
        cpp.syrk_accumulate_(total, torch.randn(5, dim))
        x, values = torch.randn(3, dim), torch.rand(dim)
        for exponent in (1.0, 0.5):
            cpp.eigen_scale_dot(x, torch.rand(3), values, 0.1, exponent=exponent, split=dim - 1)
            cpp.corrected_scale_dot(x, x.square(), 0.9, 2.0, 0.1, exponent=exponent)
        for usable in (True, False):
            state = (x.clone(), x.square(), torch.ones(()), torch.tensor(usable))
            cpp.adam_scale(x, *state, betas=(0.9, 0.99), eps=1e-8, nesterov=usable)
    child = os.fork()
    if not child:  # that the sanitizer is there at all: one element too many
        os.close(2)
        out = torch.zeros(packed_numel(129) - 1)
        library().ds_kfac_pack(
            out.data_ptr(), 0, 1, integers([0]), pointers([matrices[3]]), integers([129]), integers([129]), 1
        )
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status != 0, "the sanitizer let a bad access pass"
    assert isinstance(library(), ctypes.CDLL)
    print("bad access caught")


if __name__ == "__main__":
    main()
