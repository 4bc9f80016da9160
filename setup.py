"""Packaging of dflash-jax."""

import setuptools

JAX = ">=0.10.2,<0.13"
LINUX = "; sys_platform == 'linux'"

setuptools.setup(
    name="dflash-jax",
    version="0.1.0",
    description="DFlash and DFlash2 block-drafted speculative decoding for Qwen3.5, in JAX",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=setuptools.find_packages(
        include=["dflash_jax", "dflash_jax.*", "pallas_kernels", "pallas_kernels.*"]
    ),
    # The embedded checkpoints: a plain folder, not a package.
    package_data={"dflash_jax": ["pretrained/**"]},
    install_requires=[
        f"jax{JAX}",
        "flax",
        "orbax-checkpoint",
        "safetensors>=0.5",
        "chex",
        "absl-py",
        "numpy",
        "jaxtyping",
        "tokenizers",
        "rich",
    ],
    extras_require={
        "gpu": [f"jax[cuda12]{JAX}{LINUX}", f"jax-triton{LINUX}", f"triton{LINUX}"],
        # Compilers of the kernel report; no GPU is needed.
        "kernels": ["triton==3.9.0; sys_platform == 'linux' and platform_machine == 'x86_64'"],
        "train": ["optax", "grain", "ml_collections"],
        "hf": ["transformers", "huggingface_hub"],
        # The code nobody here wrote: exact versions, so that the fixtures can be made again.
        "parity": ["torch==2.13.0", "transformers==5.15.0", "dflash==0.1.0"],
        "notebook": ["ipykernel", "nbclient", "nbformat", "matplotlib"],
        "test": ["pytest", "pytest-xdist", "pytest-cov", "hypothesis", "ruff", "optax"],
    },
)
