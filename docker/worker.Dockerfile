# A node. NVIDIA's PyTorch image brings CUDA, PyTorch and Transformer Engine built for one another, so
# neither is installed here: a second torch would no longer match Transformer Engine.
#   docker build -f docker/worker.Dockerfile -t octrain-worker .
#   docker build -f docker/worker.Dockerfile --target cpu -t octrain-worker-cpu .
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY fp8core fp8core
COPY api api
COPY worker worker
COPY octrain octrain
COPY migrations migrations
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim AS cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN useradd --system --create-home --uid 10001 octrain \
    && install -d -o octrain -g octrain /var/lib/octrain /var/lib/octrain/artifacts /var/lib/octrain/worker
COPY --from=build /wheels /wheels
COPY constraints /constraints
RUN pip install --no-cache-dir -c /constraints/ci.txt "$(echo /wheels/octrain-*.whl)[worker]" \
    && rm -r /wheels
USER 10001
ENV OCTRAIN_ARTIFACT_URL=file:///var/lib/octrain/artifacts
ENTRYPOINT ["python", "-m", "octrain_worker"]
CMD ["run", "--data-dir", "/var/lib/octrain/worker"]

# 26.09 brings torch 2.14.0a0+b2c75dd062.nv26.09 and Transformer Engine 2.19.0. To pip a pre-release comes
# before its release: 26.03 with torch 2.11.0a0 would not do for torch>=2.11.
FROM nvcr.io/nvidia/pytorch:26.09-py3 AS gpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN useradd --system --create-home --uid 10001 octrain \
    && install -d -o octrain -g octrain /var/lib/octrain /var/lib/octrain/artifacts /var/lib/octrain/worker
COPY --from=build /wheels /wheels
# The image's own torch satisfies torch>=2.11; the constraint keeps pip from replacing it.
RUN python -c "import torch; print('torch==' + torch.__version__)" > /tmp/torch.txt \
    && pip install --no-cache-dir -c /tmp/torch.txt "$(echo /wheels/octrain-*.whl)[worker]" \
    && rm -r /wheels /tmp/torch.txt
USER 10001
ENV OCTRAIN_ARTIFACT_URL=file:///var/lib/octrain/artifacts
ENTRYPOINT ["python", "-m", "octrain_worker"]
CMD ["run", "--data-dir", "/var/lib/octrain/worker"]
