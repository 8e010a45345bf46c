"""A Spack package for trainkit.

Copy this file to packages/py_trainkit_hpc/package.py in a Spack repository, and build a checkout with
`spack develop --path CHECKOUT py-trainkit-hpc@main`.
"""

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import conflicts, depends_on, license, variant, version


class PyTrainkitHpc(PythonPackage):
    """One YAML config from a laptop to a thousand GPUs: launch, train and resume PyTorch on Slurm."""

    homepage = "https://example.org/trainkit"
    git = "https://example.org/trainkit.git"

    license("Apache-2.0")

    version("main", branch="main")

    variant("cuda", default=False, description="Require a PyTorch that can use GPUs")
    variant("tensorboard", default=False, description="Write TensorBoard files of every run")

    depends_on("python@3.10:3.13", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    depends_on("py-torch@2.11:2.15", type=("build", "run"))
    depends_on("py-submitit@1.5.2:1", type=("build", "run"))
    depends_on("py-cloudpickle@3:", type=("build", "run"))
    depends_on("py-pyyaml@6.0:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-click@8.1:8", type=("build", "run"))
    depends_on("py-nvidia-ml-py@12:", type=("build", "run"))
    depends_on("py-pydantic@2.7:2", type=("build", "run"))
    depends_on("py-numpy@1.26:2", type=("build", "run"))
    depends_on("py-tokenizers@0.20:0", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-torch+cuda", when="+cuda", type=("build", "run"))
    depends_on("py-tensorboard@2.16:", when="+tensorboard", type="run")

    conflicts("platform=darwin", msg="trainkit requires Linux")
    conflicts("platform=windows", msg="trainkit requires Linux")
