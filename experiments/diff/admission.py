"""SGLang's admission against ours, over random states: see `experiments.diff.sglang.budget`.

python -m experiments.diff.admission --release 0.5.23
"""

import subprocess
import sys

from experiments.diff.engines import ENGINES, ROOT, environment_of, prepare
from experiments.diff.protocol import SideError
from experiments.launch.command import parser_of

PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from experiments.diff.sglang.budget import main; main()"
)


def main() -> None:
    """Compare in the release's environment; its exit status."""
    parser = parser_of("experiments.diff.admission", __doc__)
    parser.add_argument(
        "--release", default="0.5.23", help="SGLang release (0.5.21 or later) or checkout"
    )
    options = parser.parse_args()
    try:
        launch = prepare(ENGINES["sglang"], options.release)
    except SideError as error:
        sys.exit(f"experiments.diff.admission: {error}")
    command = [launch.interpreter, "-P", "-c", PROGRAM, str(ROOT)]
    done = subprocess.run(command, env=environment_of(launch), check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
