"""The part of the package that is compiled: see `ca_jax.models.cpu_kernels`. Without a compiler it is left out."""

import jaxlib
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "ca_jax.models._cpu_kernels",
            ["ca_jax/models/cpu/kernels.cc"],
            depends=[f"ca_jax/models/cpu/{name}.h" for name in ("amx", "calls", "inner", "transform")],
            include_dirs=[f"{jaxlib.__path__[0]}/include"],
            extra_compile_args=["-std=gnu++17", "-O3", "-fno-math-errno", "-Wno-psabi"],
            language="c++",
            optional=True,
        )
    ]
)
