"""How GPUs, CUDA, NCCL and Gloo say that they failed: the words of PyTorch 2.8 and later, and of
torchrun, with the numbers and names of one run left in."""

from __future__ import annotations

_MORE = """\
Search for `{name}' in \
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace \
below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Device-side assertion tracking was not enabled by user.
"""


def _cuda(words: str, name: str) -> str:
    return f"torch.AcceleratorError: CUDA error: {words}\n{_MORE.format(name=name)}"


ILLEGAL_ADDRESS = _cuda("an illegal memory access was encountered", "cudaErrorIllegalAddress")
DEVICE_ASSERT = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1515: indexSelectLargeIndex: block: [5,0,0], "
    "thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    + _cuda("device-side assert triggered", "cudaErrorAssert")
)
ECC = _cuda("uncorrectable ECC error encountered", "cudaErrorECCUncorrectable")
NVLINK = _cuda(
    "uncorrectable NVLink error detected during the execution", "cudaErrorNvlinkUncorrectable"
)
DEVICE_BUSY = _cuda(
    "CUDA-capable device(s) is/are busy or unavailable", "cudaErrorDevicesUnavailable"
)
LOST = _cuda("unknown error", "cudaErrorUnknown")
CUDA_OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total "
    "capacity of 139.80 GiB of which 11.73 GiB is free. Process 2461 has 128.06 GiB memory in use. "
    "Of the allocated memory 127.21 GiB is allocated by PyTorch, and 202.47 MiB is reserved by "
    "PyTorch but unallocated.\n"
)
CUBLAS_OUT_OF_MEMORY = (
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n"
)
CUBLAS_FAILED = (
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, "
    "opa, opb, m, n, k, &falpha, a, CUDA_R_16BF, lda, b, CUDA_R_16BF, ldb, &fbeta, c, CUDA_R_16BF, "
    "ldc, compute_type, CUBLAS_GEMM_DEFAULT_TENSOR_OP)`\n"
)
HOST_OUT_OF_MEMORY = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate "
    "memory)\n"
)
NCCL_TIMEOUT = """\
[rank0]:[E626 06:24:44.159932949 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective \
operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, \
Timeout(ms)=600000) ran for 600030 milliseconds before timing out.
[rank0]:[E626 06:24:44.904210947 ProcessGroupNCCL.cpp:681] [Rank 0] Some NCCL operations have \
failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations \
might run on corrupted/incomplete data.
[rank0]:[E626 06:24:44.904236341 ProcessGroupNCCL.cpp:695] [Rank 0] To avoid data inconsistency, \
we are taking the entire process down.
"""
NCCL_ERROR = """\
[rank1]: torch.distributed.DistBackendError: NCCL error in: \
/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, remote process exited or there was \
a network error, NCCL version 2.27.3
[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process \
exiting prematurely.
[rank1]: Last error:
[rank1]: socketProgressOpt: Call to recv from 10.0.0.2<52812> failed : Connection reset by peer
"""
GLOO = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[127.0.0.1]:49513\n"
)
RANK_KILLED = """\
W0429 11:02:13.882000 811 torch/distributed/elastic/multiprocessing/api.py:908] Sending process \
842 closing signal SIGTERM
E0429 11:02:14.110000 811 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: \
-9) local_rank: 1 (pid: 843) of binary: /usr/bin/python3
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
