"""Job of pipelines.py: our examples/pipeline_two_shards.py, with more steps of each kind."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import optax
import pipeline_two_shards as example
from measure import few, median, report

import jdistgrad as jd


def step(shards, splits):
    """Return the time of a step, of the optimizer's too."""
    pipeline = jd.Pipeline(shards, jd.pipeline.one_f_one_b(2, splits), loss=example.mean_square)
    optimizer = jd.DistributedOptimizer(optax.sgd(0.05), [shard.parameters for shard in shards])
    images, targets = example.batch(0)

    def run():
        with jd.context() as ctx:
            loss = pipeline.step(images, targets=targets)
            optimizer.step(ctx)
        return float(loss)

    return median(run, 20, 3)


def main():
    me = jd.init(timeout=300)
    if me.rank == 0:
        shards = example.make_shards()
        report(**{f"splits_{splits}": step(shards, splits) for splits in example.SPLITS[-few(4, 1) :]})
    jd.shutdown()


if __name__ == "__main__":
    main()
