#!/usr/bin/env bash
# Run the tests of the commit that is checked out on a GPU of Hugging Face Jobs: HF_TOKEN pays, FLAVOR says which GPU.
#   VARIANTS_FROM=owner/name@v1   test the variants that are on the Hub there, and compile nothing
#   DRY_RUN=1                     show what would be submitted
# The job fetches the public sources itself and is given no secret.
set -euo pipefail
cd "$(dirname "$0")/.."
flavor=${FLAVOR:-l4x1}
if [ -z "${HF_TOKEN:-}" ] && [ -z "${DRY_RUN:-}" ]; then
  echo "NOT RUN: GPU tests on $flavor: no HF_TOKEN"
  exit 0
fi
if [[ -n "${VARIANTS_FROM:-}" && ! "$VARIANTS_FROM" =~ ^[^@/]+/[^@/]+@[^@]+$ ]]; then
  echo "error: VARIANTS_FROM: expected owner/name@revision, such as owner/name@v1, got $VARIANTS_FROM" >&2
  exit 1
fi
if [ -n "${GITHUB_REPOSITORY:-}" ]; then
  url=https://github.com/$GITHUB_REPOSITORY
else
  url=$(git remote get-url origin)
fi
commit=$(git rev-parse HEAD)
# The image has git, make and g++; the CUDA compiler comes as wheels.
job="git clone --quiet '$url' ltx && cd ltx && git checkout --quiet $commit"
if [ -n "${VARIANTS_FROM:-}" ]; then
  repository=${VARIANTS_FROM%@*} revision=${VARIANTS_FROM##*@}
  job+=" && make setup && .venv/bin/hf download '$repository' --repo-type kernel --revision '$revision' --local-dir published"
  job+=" && LOCAL_KERNELS=org/ltx-kernels=\$PWD/published/build .venv/bin/python -m pytest -m 'not slow'"
  job+=" --ignore tests/project"
else
  job+=" && make test-all BUILD_ARGS=--cuda-from-pypi"
fi
exec "${HF:-hf}" jobs run --flavor "$flavor" --timeout 90m ${DRY_RUN:+--dry-run} python:3.12 -- bash -euc "$job"
