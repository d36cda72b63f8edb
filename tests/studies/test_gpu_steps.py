"""Counts of kernels, copies and waits within a step, from a profile of torch."""

from types import SimpleNamespace

from experiments.gpu.steps import STEP, counted

CUDA = "CUDA"


def event(name, place="CPU", start=10, end=20):
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=place), time_range=span)


def test_kernels_copies_and_waits_of_a_step_are_counted():
    events = [
        event("cudaStreamSynchronize", start=5),
        event(STEP, start=10, end=50),
        event(STEP, CUDA),
        event("_append_kernel", CUDA),
        event("_append_kernel", CUDA),
        event("void at::native::elementwise_kernel", CUDA),
        event("Memcpy HtoD (Pinned -> Device)", CUDA),
        event("cudaLaunchKernel"),
        event("cudaStreamSynchronize", start=49),
        event("cudaDeviceSynchronize", start=60),  # at the end of the profile
    ]
    kernels, others, copies, waits = counted(events)
    assert kernels == {"_append_kernel": 2}
    assert others == 1
    assert copies == {"Memcpy HtoD (Pinned -> Device)": 1}
    assert waits == {"cudaStreamSynchronize": 1}
