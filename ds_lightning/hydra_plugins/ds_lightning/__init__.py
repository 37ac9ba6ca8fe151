"""The Hydra plugin: every Hydra app can use our groups and strategy names.

Installed as `hydra_plugins/ds_lightning`, which Hydra imports at the start of every app. So nothing here may import
torch or lightning; importing ds_lightning imports neither.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

import ds_lightning  # noqa: F401 - registers the strategy names

from .location import conf_url


class DsLightningSearchPathPlugin(SearchPathPlugin):
    """Adds our groups (zero, precision, strategy ...) behind the app's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append our folder; a broken installation must not break an app that never uses it."""
        url = conf_url()
        if url is not None:
            search_path.append(provider="ds_lightning", path=url)
