# The server and the controller: no torch, no GPU.
#   docker build -f docker/api.Dockerfile -t octrain-api .
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY fp8core fp8core
COPY api api
COPY worker worker
COPY octrain octrain
COPY migrations migrations
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN useradd --system --create-home --uid 10001 octrain \
    && install -d -o octrain -g octrain /var/lib/octrain /var/lib/octrain/artifacts /var/lib/octrain/worker
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/octrain-*.whl)[api]" && rm -r /wheels
USER 10001
ENV OCTRAIN_ARTIFACT_URL=file:///var/lib/octrain/artifacts
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]
ENTRYPOINT ["python", "-m", "octrain_api"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
