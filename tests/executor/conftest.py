"""Kernels of these tests run in Triton's interpreter, or on a GPU if there is one."""

from tests.quick_interpreter import hasten

hasten()
