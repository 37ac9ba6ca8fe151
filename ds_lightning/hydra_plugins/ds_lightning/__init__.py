"""The Hydra plugin: every Hydra app can use our groups and strategy names.

Installed as `hydra_plugins/ds_lightning`, which Hydra imports at the start of every app. So nothing
here may import torch, lightning or ds_lightning itself.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from .location import conf_url
from .registration import register_with_lightning

register_with_lightning()


class DsLightningSearchPathPlugin(SearchPathPlugin):
    """Adds our groups (zero, precision, strategy ...) behind the app's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append our folder; a broken installation must not break an app that never uses it."""
        url = conf_url()
        if url is not None:
            search_path.append(provider="ds_lightning", path=url)
