"""Where the configuration groups lie."""

from pathlib import Path

from ds_lightning.errors import ConfigError


def conf_folder() -> Path:
    """Return the folder of config.yaml: in the package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(
        f"The configuration groups are missing: neither {package}/conf nor {package.parent}/conf exists. Install again."
    )
