"""Build script of the distribution ``accelerate``: an independent implementation of Accelerate's interface."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "src/accelerate/__init__.py").read_text("utf-8"), re.M)[1]

TENSORBOARD = ["tensorboard"]
TRACKERS = [
    *TENSORBOARD,
    "wandb",
    "mlflow",
    "aim>=3.29",
    "comet_ml",
    "clearml",
    "dvclive",
    "swanlab",
    "trackio",
    "pillow",
]
STORES = ["fsspec"]
DOCS = ["mkdocs-material", "mkdocs-redirects", "mkdocstrings[python]"]
MENUS = ["questionary>=2"]
# Its wheels are for this platform only.
TORCHFT = ["torchft>=0.2; sys_platform == 'linux' and platform_machine == 'x86_64'"]
TESTING = [
    # pytest 9.2 hides from xdist 3.8 which tests belong together, and they share expensive fixtures.
    *[
        "pytest>=8,<9.2",
        "pytest-xdist",
        "pytest-timeout",
        "coverage>=7.10",
        "parameterized",
        "hypothesis",
        "scikit-learn",
        "torchdata",
    ],
    *[*TENSORBOARD, *STORES, "s3fs", "moto[server]>=5"],
    *["argcomplete", "cloudpickle", "ipykernel", "jsonschema", "jupyter_client", *MENUS, "torchao"],
]
EXTRAS = {
    "quality": ["ruff==0.17.5", "vulture>=2.14", "mypy>=2.4"],
    "testing": TESTING,
    "test_trackers": TENSORBOARD,
    "trackers": TRACKERS,
    "docs": DOCS,
    "release": ["build", "twine", "cyclonedx-bom"],
    # The site in a browser; Chromium and chromedriver come from the operating system.
    "site": [*DOCS, "selenium>=4.30"],
    "transformers": ["transformers>=4.46"],
    "interop": [
        "transformers>=4.46",
        "trl",
        "peft",
        "diffusers",
        "sentence-transformers",
        "datasets",
        "optuna",
        "bitsandbytes",
        "pytest-mock",
        "schedulefree",
        "lightning-fabric",
        # The schemas of Kubernetes, offline.
        "kubernetes-validate",
        *TORCHFT,
    ],
    "object-stores": STORES,
    "deepspeed": ["deepspeed>=0.18.2"],
    "ray": ["ray[train]"],
    "torchft": TORCHFT,
    "benchmarks": ["matplotlib", "peft", "transformers>=4.46"],
    "sagemaker": ["sagemaker>=2,<3", "boto3"],
    "rich": ["rich"],
    "completion": ["argcomplete"],
    "menus": MENUS,
}
EXTRAS["dev"] = sorted({*EXTRAS["quality"], *EXTRAS["testing"]})

setup(
    name="accelerate",
    version=VERSION,
    description="A maintained, independent implementation of Accelerate's interface, with double-prepare detection",
    long_description=(HERE / "README.md").read_text("utf-8") if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    # sentence-transformers trains only where the home page of `accelerate` names huggingface; it says what this replaces.
    url="https://github.com/OWNER/accelerate-fork#a-drop-in-for-huggingface-accelerate",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    keywords="deep learning distributed training pytorch",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={"accelerate": ["py.typed", "extensions/*.pyi"], "transformers_patch": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "numpy>=1.17",
        "packaging>=20.0",
        "psutil",
        "pyyaml",
        "torch>=2.7",
        "huggingface_hub>=0.21.0",
        "safetensors>=0.4.3",
        "xxhash>=3.0",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "accelerate=accelerate.commands.accelerate_cli:main",
            "accelerate-config=accelerate.commands.config:main",
            "accelerate-estimate-memory=accelerate.commands.estimate:main",
            "accelerate-launch=accelerate.commands.launch:main",
            "accelerate-merge-weights=accelerate.commands.merge:main",
        ]
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
