{{/*
What runs on nodes. The operator applies these from the ConfigMap gpu-migrate-templates, on the nodes that ask for them;
with bridge.managed false the chart applies the node agent itself.
*/}}

{{/* The node agent; call with (dict "root" $ "isolation" "none" "static" false). */}}
{{- define "gpu-migrate.agent" -}}
{{- $c := dict "root" .root "component" "bridge" }}
{{- $v := .root.Values.bridge }}
{{- $suffix := ternary "" (printf "-%s" .isolation) (or .static (eq .isolation "none")) -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: gpu-migrate-bridge{{ $suffix }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "gpu-migrate.labels" $c | nindent 4 }}
spec:
  selector:
    matchLabels:
      {{- include "gpu-migrate.selector" $c | nindent 6 }}
      gpu-migrate.io/isolation: {{ .isolation }}
  updateStrategy:
    rollingUpdate: {maxUnavailable: 1}
  template:
    metadata:
      labels:
        {{- include "gpu-migrate.labels" $c | nindent 8 }}
        gpu-migrate.io/isolation: {{ .isolation }}
    spec:
      serviceAccountName: gpu-migrate-bridge
      {{- with include "gpu-migrate.pod" (dict "root" .root "priorityClassName" .root.Values.bridge.priorityClassName) | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- with $v.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      # Exceptions to the restricted standard, and why:
      #   root     the kubelet's directories belong to root; no capability is needed
      #   hostPath the kubelet's device-plugin and pod-resources directories are its interface
      {{- $hostPID := or $v.hostPID (eq .isolation "vcuda") }}
      {{- if $hostPID }}
      #   hostPID  NVML lists the processes of its caller's PID namespace alone
      {{- end }}
      {{- if has .isolation (list "vcuda" "hami-core" "mps") }}
      #   hostPath the isolation's libraries and sockets are given to containers from the host
      {{- end }}
      {{- if $hostPID }}
      hostPID: true
      {{- end }}
      securityContext:
        runAsUser: 0
        seccompProfile: {type: RuntimeDefault}
      {{- with $v.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if .static }}
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {key: gpu-migrate.io/plugin, operator: In, values: [Bridged, Shared]}
      {{- end }}
      {{- with $v.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- $folders := list }}
      {{- if has .isolation (list "vcuda" "hami-core") }}
      {{- $folders = append $folders (dict "name" "libraries" "path" $v.libraryDir "readOnly" true) }}
      {{- $folders = append $folders (dict "name" "manager" "path" $v.managerDir) }}
      {{- end }}
      {{- if eq .isolation "mps" }}
      {{- $folders = append $folders (dict "name" "mps" "path" $v.mpsDir) }}
      {{- end }}
      {{- with $v.cdiSpecDir }}
      {{- $folders = append $folders (dict "name" "cdi" "path" .) }}
      {{- end }}
      volumes:
        - name: device-plugins
          hostPath: {path: {{ $v.kubeletDir }}/device-plugins, type: Directory}
        - name: pod-resources
          hostPath: {path: {{ $v.kubeletDir }}/pod-resources, type: DirectoryOrCreate}
        - name: cgroup
          hostPath: {path: /sys/fs/cgroup, type: Directory}
        {{- range $folders }}
        - name: {{ .name }}
          hostPath: {path: {{ .path }}, type: DirectoryOrCreate}
        {{- end }}
      containers:
        - name: bridge
          image: {{ include "gpu-migrate.image" $c }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args:
            - --kubelet-dir={{ $v.kubeletDir }}
            - --cgroup-dir=/host/sys/fs/cgroup
            - --isolation={{ .isolation }}
            - --device-list-strategy={{ join "," $v.deviceListStrategy }}
            - --device-id-strategy={{ $v.deviceIdStrategy }}
            {{- if $v.passDeviceSpecs }}
            - --pass-device-specs
            {{- end }}
            {{- if $v.numaHints }}
            - --numa-hints
            {{- end }}
            {{- if $v.registerOverNvidiaPlugin }}
            - --register-over-nvidia-plugin
            {{- end }}
            {{- with $v.cdiSpecDir }}
            - --cdi-spec-dir={{ . }}
            {{- end }}
            {{- if has .isolation (list "vcuda" "hami-core") }}
            - --library-dir={{ $v.libraryDir }}
            - --manager-dir={{ $v.managerDir }}
            {{- end }}
            {{- if eq .isolation "mps" }}
            - --mps-dir={{ $v.mpsDir }}
            {{- end }}
            - --metrics-bind=[::]:9404
            - --log-format={{ .root.Values.logFormat }}
            {{- with .root.Values.tracing.endpoint }}
            - --otlp-endpoint={{ . }}
            {{- end }}
          env:
            - {name: GPU_MIGRATE_LOG, value: {{ .root.Values.logLevel | quote }}}
            - name: NODE_NAME
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            # All cards for NVML, and no more of the driver than that.
            - {name: NVIDIA_VISIBLE_DEVICES, value: all}
            - {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
          ports:
            - {name: metrics, containerPort: 9404}
          livenessProbe:
            httpGet: {path: /livez, port: metrics}
          readinessProbe:
            httpGet: {path: /readyz, port: metrics}
            periodSeconds: 2
          volumeMounts:
            - {name: device-plugins, mountPath: {{ $v.kubeletDir }}/device-plugins}
            - {name: pod-resources, mountPath: {{ $v.kubeletDir }}/pod-resources, readOnly: true}
            - {name: cgroup, mountPath: /host/sys/fs/cgroup, readOnly: true}
            {{- range $folders }}
            - {name: {{ .name }}, mountPath: {{ .path }}{{ if .readOnly }}, readOnly: true{{ end }}}
            {{- end }}
          securityContext: {{- include "gpu-migrate.containerSecurity" .root | nindent 12 }}
          resources: {{- toYaml $v.resources | nindent 12 }}
{{- end }}

{{/* NVIDIA's plugin, unmodified; call with (dict "root" $ "bridged" true). */}}
{{- define "gpu-migrate.nvidiaPlugin" -}}
{{- $c := dict "root" .root "component" (ternary "nvidia-plugin-bridged" "nvidia-plugin" .bridged) }}
{{- $v := .root.Values.nvidiaPlugin }}
{{- $folder := printf "%s/device-plugins" .root.Values.bridge.kubeletDir -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: gpu-migrate-{{ $c.component }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "gpu-migrate.labels" $c | nindent 4 }}
spec:
  selector:
    matchLabels: {{- include "gpu-migrate.selector" $c | nindent 6 }}
  template:
    metadata:
      labels: {{- include "gpu-migrate.labels" $c | nindent 8 }}
    spec:
      automountServiceAccountToken: false
      {{- with include "gpu-migrate.pod" (dict "root" .root "priorityClassName" .root.Values.bridge.priorityClassName) | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- with .root.Values.bridge.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      # Root and hostPath: the kubelet's directory of plugin sockets is root's.
      securityContext:
        runAsUser: 0
        seccompProfile: {type: RuntimeDefault}
      {{- with .root.Values.bridge.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      volumes:
        - name: device-plugins
          hostPath: {path: {{ $folder }}, type: Directory}
      containers:
        - name: nvidia-plugin
          image: {{ $v.image }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          env:
            - {name: FAIL_ON_INIT_ERROR, value: "false"}
            {{- if .bridged }}
            - {name: KUBELET_SOCKET, value: {{ $folder }}/gpu-migrate@kubelet.sock}
            {{- end }}
            {{- with $v.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          volumeMounts:
            - {name: device-plugins, mountPath: /var/lib/kubelet/device-plugins}
          securityContext: {{- include "gpu-migrate.containerSecurity" .root | nindent 12 }}
          resources: {{- toYaml $v.resources | nindent 12 }}
{{- end }}

{{/* NVIDIA's exporter; call with the root. */}}
{{- define "gpu-migrate.dcgmExporter" -}}
{{- $c := dict "root" . "component" "dcgm-exporter" }}
{{- $v := .Values.dcgmExporter -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: gpu-migrate-dcgm-exporter
  namespace: {{ .Release.Namespace }}
  labels: {{- include "gpu-migrate.labels" $c | nindent 4 }}
spec:
  selector:
    matchLabels: {{- include "gpu-migrate.selector" $c | nindent 6 }}
  template:
    metadata:
      labels: {{- include "gpu-migrate.labels" $c | nindent 8 }}
    spec:
      automountServiceAccountToken: false
      {{- with include "gpu-migrate.pod" (dict "root" . "priorityClassName" "") | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- with .Values.bridge.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      # Root and hostPath: the socket of pod-resources is root's.
      securityContext:
        runAsUser: 0
        seccompProfile: {type: RuntimeDefault}
      {{- with .Values.bridge.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      volumes:
        - name: pod-resources
          hostPath: {path: {{ .Values.bridge.kubeletDir }}/pod-resources, type: Directory}
      containers:
        - name: dcgm-exporter
          image: {{ $v.image }}
          imagePullPolicy: {{ .Values.image.pullPolicy }}
          env:
            - {name: DCGM_EXPORTER_LISTEN, value: ":9400"}
            - {name: DCGM_EXPORTER_KUBERNETES, value: "true"}
          ports:
            - {name: metrics, containerPort: 9400}
          volumeMounts:
            - {name: pod-resources, mountPath: /var/lib/kubelet/pod-resources, readOnly: true}
          # A writable root file system: DCGM keeps its files there.
          securityContext:
            allowPrivilegeEscalation: false
            capabilities: {drop: [ALL]}
          resources: {{- toYaml $v.resources | nindent 12 }}
{{- end }}
