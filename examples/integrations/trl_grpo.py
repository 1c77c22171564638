"""TRL's GRPOTrainer: a model that was taught a little addition learns it from rewards. K-FAC is in the JSON alone.

python -m ds_kfac run --num_accelerators 1 --module examples.integrations.trl_grpo --steps 60
python -m ds_kfac run --num_accelerators 1 --module examples.integrations.trl_grpo --steps 60 --adamw
python -m ds_kfac run --num_accelerators 1 --module examples.integrations.trl_grpo --steps 60 --lora

The first two end with one plot of both, reward against steps, in runs/integrations. The first went from 0.14 right
answers (mean of the first ten steps) to 0.25 (of the last ten), with 41 s of a core's time in all. With 128 answers a
step in place of 512 it learned nothing in 40 steps.
"""

import csv
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from ds_kfac.integrations.transformers import KFACCallback
from examples.integrations import tiny

LARGEST, SUPERVISED_STEPS, RATE = 50, 200, 3e-4
ANSWERS = 512
"""Of a rank and step."""
KFACADAMW = {"type": "KFACAdamW", "params": {"lr": RATE, "adam_lr": RATE, "torch_adam": True}}
"""adam_lr as lr: embeddings and norms are trained already (docs/reinforcement.md)."""
ADAMW = {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}}


def sums(seed: int, count: int) -> Dataset:
    source = random.Random(seed)
    pairs = [(source.randrange(LARGEST), source.randrange(LARGEST)) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"{a:02}+{b:02}=", "answer": str(a + b)} for a, b in pairs])


def rewards(completions: list[str], answer: list[str], **_) -> list[float]:
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def taught(steps: int = SUPERVISED_STEPS) -> LlamaForCausalLM:
    """A model after so many supervised steps: in a script of your own this is a checkpoint."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=32, pad_token_id=257, **sizes))
    model.generation_config.eos_token_id = model.config.eos_token_id = 256
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    tokenizer = tiny.tokenizer()
    for step in range(steps):
        rows = sums(step + 1, 128)
        texts = [f"{row['prompt']}{row['answer']}<eos>" for row in rows]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :6] = -100  # of the question
        model(batch["input_ids"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def main(argv: Sequence[str] | None = None) -> GRPOTrainer:
    options = tiny.options(argv, flags=("--adamw", "--lora"))
    arguments = GRPOConfig(
        output_dir=str(options.out),
        deepspeed=tiny.ds_config(options.deepspeed, optimizer=ADAMW if options.adamw else KFACADAMW),
        max_steps=options.steps,
        learning_rate=(ADAMW if options.adamw else KFACADAMW)["params"]["lr"],
        lr_scheduler_type="cosine",
        warmup_steps=2,
        per_device_train_batch_size=ANSWERS,
        num_generations=8,
        max_completion_length=4,
        beta=0.0,
        logging_steps=1,
        save_steps=max(1, options.steps // 2),
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=tiny.ON_CPU,
    )
    trainer = GRPOTrainer(
        model=taught(),
        reward_funcs=rewards,
        args=arguments,
        train_dataset=sums(0, 4096),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if options.lora else None,
    )
    KFACCallback.add_to(trainer)
    trainer.train(resume_from_checkpoint=options.resume and str(options.resume))
    if trainer.is_world_process_zero():
        name = ("adamw" if options.adamw else "kfacadamw") + ("_lora" if options.lora else "")
        keep(trainer, options.out / f"{name}_rewards.csv")
        draw(options.out)
    return trainer


def keep(trainer: GRPOTrainer, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("step", "reward"), *((entry["step"], entry["reward"]) for entry in entries)])


def draw(folder: Path) -> None:
    """All runs in a folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    for path in sorted(folder.glob("*_rewards.csv")):
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        axis.plot([int(row["step"]) for row in rows], [float(row["reward"]) for row in rows], label=path.stem[:-8])
    axis.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(folder / "rewards.png", dpi=130, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()
