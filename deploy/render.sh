#!/bin/sh
# Renders the chart's defaults into deploy/base, for those who use kustomize or plain manifests, and what needs the Prometheus
# operator into deploy/monitoring. A test holds them against each other. Needs helm.
set -eu
cd "$(dirname "$0")"
render() {
    echo "# Rendered from deploy/chart by deploy/render.sh; do not edit."
    "${HELM:-helm}" template gpu-migrate chart/gpu-migrate --namespace gpu-migrate-system \
        --kube-version 1.33.0 "$@" | grep -v '^# Source: '
}
for part in webhook extender operator bridge templates; do
    render --show-only "templates/$part.yaml" >"base/$part.yaml"
done
mkdir -p monitoring
render --show-only templates/monitoring.yaml --set metrics.podMonitor.enabled=true \
    --set metrics.prometheusRule.enabled=true --set metrics.dashboard.enabled=true >monitoring/monitoring.yaml
