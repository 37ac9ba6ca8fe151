"""A Hydra app of your own that picks from our groups and never imports ds_lightning.

python app.py zero=stage3 precision=bf16
python app.py zero.stage=1 trainer.max_steps=50
"""

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig


@hydra.main(config_path="conf", config_name="app", version_base="1.3")
def main(config: DictConfig) -> None:
    model = instantiate(config.model, _convert_="all")
    data = instantiate(config.data, _convert_="all")
    trainer = instantiate(config.trainer, strategy=instantiate(config.strategy), _convert_="all")
    trainer.fit(model, data)
    if trainer.is_global_zero:
        print(f"stage {config.zero.stage}: loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
