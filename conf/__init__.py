"""The configuration groups; a package, so that Hydra finds them as pkg://ds_lightning.conf."""
