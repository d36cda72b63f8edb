"""Models and machines: what is cached and computed, and how fast."""

from hicache.models.formats import FORMATS as FORMATS
from hicache.models.formats import PLAIN as PLAIN
from hicache.models.formats import coded_page_bytes as coded_page_bytes
from hicache.models.machines import CopyKernelConfig as CopyKernelConfig
from hicache.models.machines import Figure as Figure
from hicache.models.machines import HardwareConfig as HardwareConfig
from hicache.models.machines import RateTable as RateTable
from hicache.models.shapes import GIB as GIB
from hicache.models.shapes import LayerKind as LayerKind
from hicache.models.shapes import ModelConfig as ModelConfig
