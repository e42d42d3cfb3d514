#!/bin/sh
# Renders the chart's defaults into deploy/base, for those who use kustomize or plain manifests.
# A test holds the two against each other. Needs helm.
set -eu
cd "$(dirname "$0")"
for part in webhook extender operator bridge; do
    {
        echo "# Rendered from deploy/chart by deploy/render.sh; do not edit."
        "${HELM:-helm}" template gpu-migrate chart/gpu-migrate --namespace gpu-migrate-system \
            --kube-version 1.33.0 --show-only "templates/$part.yaml" | grep -v '^# Source: '
    } >"base/$part.yaml"
done
