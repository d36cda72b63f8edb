"""Pipeline stages: which layers each holds, its part of a model, and the cost of them together."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from hicache.models.cost import CHUNK_TOKENS, CostModel
from hicache.models.machines import HardwareConfig
from hicache.models.shapes import ModelConfig


def layers_of_stages(num_layers: int, pp: int, given: Sequence[int] = ()) -> list[int]:
    """Return how many layers each of `pp` stages holds: as `given`, or else as SGLang divides them.

    SGLang gives the last stages one layer more if the layers cannot be divided evenly.

    Raises:
        ValueError: the layers cannot be divided in this way.
    """
    if given and (len(given), sum(given)) != (pp, num_layers):
        raise ValueError(
            f"parallel.stage_layers must name {pp} numbers whose sum is the {num_layers} layers of "
            f"the model, got {list(given)}"
        )
    least, rest = divmod(num_layers, pp)
    if not least:
        raise ValueError(f"parallel.pp must be at most the {num_layers} layers, got {pp}")
    return list(given) or [least + (stage >= pp - rest) for stage in range(pp)]


def stage_models(model: ModelConfig, layers: Sequence[int]) -> list[ModelConfig]:
    """Return the part of `model` that each stage holds.

    The first stage has the embedding, and the last the output head and what lies outside the layer
    pattern. Layers without experts come first. The other parameters are divided by layers.

    Raises:
        ValueError: a stage has no layer of some kind that the model caches, or needs the KV of
            another stage.
    """
    parts, total, last = [], sum(layers), len(layers) - 1
    embedding = model.embedding_params or model.head_params
    for stage, (start, end) in enumerate(pairwise(accumulate(layers, initial=0))):
        words = model.layer_words[start:end]
        part = replace(
            model,
            **_counted(model, words),
            parts=tuple(
                each if stage == last else replace(each, num_layers=0) for each in model.parts
            ),
            dense_params=round(model.dense_params * (end - start) / total),
            num_moe_layers=max(end - max(start, total - model.num_moe_layers), 0),
            head_params=model.head_params if stage == last else 0,
            embedding_params=0 if stage else embedding,
        )
        is_lacking = [each for each in model.kinds if not part.num_holders(each)]
        if is_lacking or {"f", "s"} & set("".join(words)):
            what = "KV of other stages" if not is_lacking else f"no {is_lacking[0].value} layer"
            raise ValueError(
                f"parallel.pp={len(layers)}: stage {stage} of {model.name} (layers {start} to "
                f"{end - 1}) has {what}; choose parallel.stage_layers so that each stage has all "
                "kinds of layers, with KV of its own"
            )
        parts.append(part)
    return parts


def _counted(model: ModelConfig, words: Sequence[str]) -> dict[str, Any]:
    letters = "".join(words)
    counts = {"full": "Ff", "swa": "Ss", "mamba": "MD"}
    found: dict[str, Any] = {
        f"num_{kind}_layers": sum(bool(set(own) & set(word)) for word in words)
        for kind, own in counts.items()
    }
    return found | {
        "pattern": " ".join(words),
        "num_layers": len(words),
        "window_len": model.window_len if found["num_swa_layers"] else 0,
        "top_tokens": model.top_tokens if "t" in letters else 0,
    }


class PipelineCost(CostModel):
    """The cost of a model whose `stages` compute at the same time, each another batch.

    What a request occupies is the time of the slowest stage.
    """

    def __init__(
        self,
        model: ModelConfig,
        hardware: HardwareConfig,
        *,
        tp: int,
        stages: Sequence[CostModel],
    ) -> None:
        super().__init__(model, hardware, tp=tp, pp=len(stages))
        self.stages = stages

    def prefill_s(self, start: int, end: int, *, chunk_tokens: int = CHUNK_TOKENS) -> float:
        return max(each.prefill_s(start, end, chunk_tokens=chunk_tokens) for each in self.stages)

    def offered_s(self, prompt_cached: int, prompt_len: int, output_len: int, batch: int) -> float:
        lengths = prompt_cached, prompt_len, output_len, batch
        return max(each.offered_s(*lengths) for each in self.stages)
