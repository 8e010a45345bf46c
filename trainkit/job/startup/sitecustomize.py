"""Runs when a Python interpreter starts in a job, because every rank's PYTHONPATH begins with this folder.

Python imports only the first module named sitecustomize, so this module imports the next one itself. Any
version of Python may execute this file, so its syntax is limited to Python 2.7.
"""

import os
import sys

if __name__ == "sitecustomize":
    folder = os.path.dirname(__file__)  # noqa: PTH120
    sys.path[:] = [one for one in sys.path if one != folder]
    if sys.version_info >= (3, 8):  # noqa: UP036
        try:
            from importlib.machinery import SourceFileLoader

            module = sys.modules["trainkit_python_start"] = type(sys)("trainkit_python_start")
            module.__file__ = os.path.dirname(folder) + "/python_start.py"  # noqa: PTH120
            SourceFileLoader(module.__name__, module.__file__).exec_module(module)
        except Exception as error:
            sys.stderr.write("trainkit cannot prepare this Python: %s: %s\n" % (type(error).__name__, error))  # noqa: UP031
    # If there is no other sitecustomize, the import fails, and Python handles the failure as it would without
    # this file.
    del sys.modules[__name__]
    import sitecustomize  # type: ignore # noqa: F401
