"""Pipeline parallelism: layers as specs, stages, schedules and their engine (§9.2 §9.9 §9.10)."""

from ds_lite.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
