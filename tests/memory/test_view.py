"""How a job looks at its pictures: flags, the model's own settings, and what they cost."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from light import ONEVISION, SIGLIP, TINY_VISION, model_of, words

from vlmrun.errors import CheckpointError, UsageError
from vlmrun.job import Job, Placing
from vlmrun.memory.floor import floor
from vlmrun.memory.plan import Plan
from vlmrun.memory.workload import plan_job, view_of
from vlmrun.models.model import Model

NAFLEX = model_of({"model_type": "siglip2_vision_model"})
VISION = model_of(TINY_VISION)
PLACING = Placing(model="a-model", device="cpu", ram="64GiB", batch_size=1)


def embed(**values: Any) -> Job:
    return Job(task="embed", placing=PLACING, images=("x",), **values)


def plan(model: Model, job: Job, *sizes: tuple[int, int]) -> Plan:
    return plan_job(model, job, sizes)


def with_settings(folder: Path, settings: object) -> Model:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return replace(NAFLEX, source=replace(NAFLEX.source, folder=folder))


@pytest.mark.parametrize(
    ("settings", "asked", "most"),
    [
        ({"max_num_patches": 64}, None, 64),
        ({"max_num_patches": 64}, 1024, 1024),
        ({"image_mean": [0.5]}, None, 256),
    ],
)
def test_a_flag_goes_before_the_image_processor(
    tmp_path: Path, settings: object, asked: int | None, most: int
) -> None:
    model = with_settings(tmp_path, settings)
    job = embed(max_patches=asked)
    assert view_of(model, job).max_patches == most
    assert plan(model, job, (4000, 10)).workload.image.tokens == most


def test_a_model_of_the_catalogue_has_the_default_of_the_class() -> None:
    assert view_of(NAFLEX, embed()).max_patches == 256


@pytest.mark.parametrize("most", [0, -1, "256", True, 2.5, None])
def test_numbers_of_patches_that_cannot_be(tmp_path: Path, most: object) -> None:
    model = with_settings(tmp_path, {"max_num_patches": most})
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: max_num_patches"):
        view_of(model, embed())


def test_settings_are_asked_for_where_there_are_pictures(tmp_path: Path) -> None:
    model = replace(NAFLEX, source=replace(NAFLEX.source, folder=tmp_path))
    with pytest.raises(CheckpointError, match="is missing"):
        view_of(model, embed())
    assert view_of(model, replace(embed(), images=(), texts=("a cat",))).max_patches is None


@pytest.mark.parametrize(
    ("config", "values", "expected"),
    [
        (SIGLIP, {"max_patches": 9}, "--max-patches: a-model sees every picture as a square"),
        (TINY_VISION, {"max_patches": 9}, "--max-patches: a-model"),
        (
            {"model_type": "siglip2_vision_model"},
            {"dynamic_size": True},
            "--dynamic-size: a-model is no SigLIP tower of a fixed size",
        ),
        (ONEVISION, {"dynamic_size": True}, "--dynamic-size: a-model"),
    ],
)
def test_flags_for_other_models(
    config: dict[str, Any], values: dict[str, Any], expected: str
) -> None:
    model = model_of(config)
    job = Job(task=model.family.task, placing=PLACING, images=("x",), **values)
    with pytest.raises(UsageError) as caught:
        plan_job(model, job, [(30, 40)])
    assert expected in words(caught.value)


def test_pictures_at_their_own_size_are_counted() -> None:
    """The largest of them decides: memory, arithmetic, and whether it fits at all."""
    own = embed(dynamic_size=True)
    square, small, large = (
        plan(VISION, job, (28, 28), size)
        for job, size in ((embed(), (900, 600)), (own, (40, 30)), (own, (900, 600)))
    )
    assert square.workload.image.tokens == 16
    assert small.workload.image.tokens == 6 * 5
    assert large.workload.image.tokens == 129 * 86
    used = [p.working.activation_bytes["vision"] for p in (square, small, large)]
    assert used[0] < used[1] < used[2]
    assert large.working.activation_bytes["vision"] > 129 * 86 * 2 * 16 * 4
    assert large.working.picture_bytes > 3 * 900 * 600 * 3 * 4
    seconds = [floor(p, VISION).image_s for p in (square, small, large)]
    assert seconds[0] < seconds[2]
    huge = plan(VISION, replace(own, placing=replace(PLACING, ram="1GiB")), (9000, 9000))
    assert not huge.fits
    assert plan(VISION, replace(own, placing=replace(PLACING, ram="1GiB")), (28, 28)).fits


def test_more_patches_need_more() -> None:
    peaks = [plan(NAFLEX, embed(max_patches=n), (50, 50)).peak_ram_bytes for n in (64, 256, 4096)]
    assert peaks[0] < peaks[1] < peaks[2]
    assert peaks[2] > 4096**2 * 4  # the mask
