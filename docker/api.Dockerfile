# The server and the controller: no torch, no GPU.
#   docker build -f docker/api.Dockerfile -t octrain-api .
FROM node:22-slim AS dashboard
WORKDIR /source/dashboard
COPY dashboard/package.json dashboard/package-lock.json dashboard/.npmrc ./
RUN npm ci --no-audit --no-fund
COPY tests/api/openapi.json /source/tests/api/openapi.json
COPY dashboard ./
RUN npm run build && node scripts/compress.mjs

FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY fp8core fp8core
COPY api api
COPY worker worker
COPY octrain octrain
COPY migrations migrations
COPY --from=dashboard /source/dashboard/dist dashboard/dist
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
