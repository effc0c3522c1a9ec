"""The tables of README.md, docs/ and skills/: `pages/NAME.py` writes what `benchmarks/NAME.py` measured.

These modules have no program of their name: `families` reads the built package, `fp8` has the results of all programs
`fp8*.py`, `guarantees` has the results of tests, `results` lists the result files, `names` has the names of models and
configurations, and `writing` has what all of them use. `benchmarks/readme.py` runs them. The comment before a table in
its page leads to its code: the writer of <!-- two GPUs --> in docs/measured/parallel.md begins with
`@block("docs/measured/parallel.md", "two GPUs")`. For a new table write such a function, put <!-- NAME --> and
<!-- /NAME --> into a page of docs/measured/, and run `benchmarks/readme.py`. Guides have no tables of measurements.
"""
