from trainkit.api import Group as Group
from trainkit.api import Run as Run
from trainkit.api import RunError as RunError
from trainkit.api import map_array as map_array
from trainkit.api import runs as runs
from trainkit.api import submit as submit
from trainkit.api import sweep as sweep
from trainkit.errors import ConfigError as ConfigError
from trainkit.errors import SlurmError as SlurmError
from trainkit.errors import TrainkitError as TrainkitError
from trainkit.errors import UsageError as UsageError
from trainkit.function import Requeue as Requeue

__version__: str
