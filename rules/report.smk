# SPDX-License-Identifier: Apache-2.0
# The quality report: one page from the run's small files.


rule report:
    input:
        manifest=rules.inspect_source.output.manifest,
        plans=expand(rules.freeze_plan.output.plan, recipe=RECIPES),
        receipts=expand(rules.finish_release.output.receipt, recipe=RECIPES),
        ledgers=ledgers_of(RECIPES),
        captures=expand(rules.capture.output.stats, split=SPLITS, layer=LAYERS),
        hessians=expand(rules.hessians.output.receipt, layer=LAYERS),
        comparisons=expand(rules.compare.output.comparison, recipe=RECIPES, panel=PANELS),
        floors=expand(rules.compare_floor.output.comparison, panel=PANELS),
        contests=[
            path
            for recipe, baseline in BASELINES.items()
            for path in expand(
                rules.compare_recipes.output.comparison,
                recipe=recipe,
                baseline=baseline,
                panel=PANELS,
            )
        ],
        verdicts=expand(rules.judge.output.verdict, recipe=RECIPES),
        scores=expand(rules.score.output.table, recipe=RECIPES, panel=PANELS),
        records=expand(
            rules.encode.output.record,
            wanted=sorted(set(sum(WANTED.values(), []))),
            layer=LAYERS,
            block=BLOCKS,
        ),
        templates=multiext("report/", "index.html.j2", "style.css", "published.json"),
    output:
        page=report(
            "<run>/report/index.html",
            caption="../report/captions/index.rst",
            category="Quality",
            labels={"page": "quality report"},
        ),
        record="<run>/provenance/report/index.json",
    log:
        "<run>/logs/report.log",
    benchmark:
        "<run>/benchmarks/report.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("report"),
        run=settings["run"],
        few_tokens=settings["encode"]["min_tokens"],
    message:
        "Write the quality report"
    script:
        "../workflow/scripts/report.py"
