{{/* Labels of every object; call with (dict "root" $ "component" "webhook"). */}}
{{- define "gpu-migrate.labels" -}}
{{ include "gpu-migrate.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: gpu-migrate
{{- with .root.Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels that select a component's pods. */}}
{{- define "gpu-migrate.selector" -}}
app.kubernetes.io/name: gpu-migrate
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "gpu-migrate.image" -}}
{{ .root.Values.image.registry }}/gpu-migrate-{{ .component }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* What every pod may have by the values of the whole chart; call with (dict "root" $ "priorityClassName" ""). */}}
{{- define "gpu-migrate.pod" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A container that can do nothing but run its program. */}}
{{- define "gpu-migrate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "gpu-migrate.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Replicas on different nodes, and zones where there are any. */}}
{{- define "gpu-migrate.spread" -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "gpu-migrate.selector" . | nindent 14 }}
      - weight: 50
        podAffinityTerm:
          topologyKey: topology.kubernetes.io/zone
          labelSelector:
            matchLabels:
              {{- include "gpu-migrate.selector" . | nindent 14 }}
{{- end }}

{{/* Which pod we are, for leases and events. */}}
{{- define "gpu-migrate.identity" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- end }}
