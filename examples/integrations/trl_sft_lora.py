"""TRL's SFTTrainer with LoRA by peft; K-FAC as an optimizer object, so that the DeepSpeed config
says nothing of it.

deepspeed --module examples.integrations.trl_sft_lora
"""

from collections.abc import Sequence

from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import ds_kfac
from examples.integrations import tiny


def main(argv: Sequence[str] | None = None) -> SFTTrainer:
    options = tiny.options(argv)
    config = tiny.ds_config(options.deepspeed)
    config.pop("optimizer")
    arguments = SFTConfig(
        **tiny.arguments(options),
        deepspeed=config,
        max_length=64,
    )
    trainer = SFTTrainer(
        model=tiny.model(),
        args=arguments,
        train_dataset=tiny.texts(),
        eval_dataset=tiny.texts(16),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        optimizer_cls_and_kwargs=(ds_kfac.KFACAdamW, {"lr": 1e-3, "torch_adam": True}),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    return trainer


if __name__ == "__main__":
    main()
