"""Where the configuration groups lie, found without importing ds_lightning."""

from importlib.util import find_spec
from pathlib import Path


def conf_url() -> str | None:
    """Return file:// and the folder that `pkg://ds_lightning.conf` names; None where there is none.

    Hydra resolves pkg:// by importing the package, and importing ds_lightning may bring torch into
    an app that only wants its own --help.
    """
    spec = find_spec("ds_lightning")
    for location in (spec.submodule_search_locations or []) if spec else []:
        package = Path(location)
        for folder in (
            package / "conf",
            package.parent / "conf",
        ):  # installed, or a source checkout
            if (folder / "zero" / "stage3.yaml").is_file():
                return f"file://{folder.resolve()}"
    return None
