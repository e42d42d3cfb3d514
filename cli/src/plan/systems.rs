//! Other systems that share cards, by what their users write into a pod. Names as in their documents and code of 2026.

use serde_json::Value;

/// Another system's request, and what of it nothing of ours honours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub system: &'static str,
    /// The resources, annotations or labels by which it is known.
    pub by: Vec<String>,
}

struct System {
    name: &'static str,
    /// Beginnings of resource names.
    resources: &'static [&'static str],
    /// Beginnings of keys of annotations and labels.
    keys: &'static [&'static str],
}

/// HAMi and vgpu-manager use the domain of NVIDIA, with other names than NVIDIA's plugin.
const SYSTEMS: [System; 8] = [
    System {
        name: "HAMi",
        resources: &["nvidia.com/gpumem", "nvidia.com/gpucores", "nvidia.com/priority"],
        keys: &[
            "hami.io/",
            "nvidia.com/use-gputype",
            "nvidia.com/nouse-gputype",
            "nvidia.com/use-gpuuuid",
            "nvidia.com/nouse-gpuuuid",
        ],
    },
    System { name: "vgpu-manager", resources: &["nvidia.com/vgpu-"], keys: &["nvidia.com/vgpu-"] },
    System {
        name: "Volcano",
        resources: &["volcano.sh/vgpu-", "volcano.sh/gpu-"],
        keys: &["volcano.sh/vgpu-"],
    },
    System { name: "KAI", resources: &[], keys: &["gpu-fraction", "gpu-memory", "kai.scheduler/queue"] },
    System {
        name: "Koordinator",
        resources: &["koordinator.sh/gpu"],
        keys: &["scheduling.koordinator.sh/device-"],
    },
    System { name: "qGPU", resources: &["tke.cloud.tencent.com/qgpu-"], keys: &[] },
    System { name: "TensorFusion", resources: &["tensor-fusion.ai/"], keys: &["tensor-fusion.ai/"] },
    System { name: "gpushare (ACK)", resources: &["aliyun.com/gpu-"], keys: &[] },
];

/// What a pod or a pod template requests of other systems.
#[must_use]
pub fn requests(template: &Value) -> Vec<Request> {
    let lists = ["containers", "initContainers"].map(|list| template["spec"][list].as_array());
    let amounts = lists.into_iter().flatten().flatten().flat_map(|container| {
        ["limits", "requests"].map(|part| container["resources"][part].as_object()).into_iter().flatten()
    });
    let mut resources = amounts.flat_map(|amounts| amounts.keys()).collect::<Vec<_>>();
    resources.sort_unstable();
    resources.dedup();
    let metadata = ["annotations", "labels"].map(|part| template["metadata"][part].as_object());
    let keys = metadata.into_iter().flatten().flat_map(|part| part.keys()).collect::<Vec<_>>();
    let named = |all: &[&String], beginnings: &[&str]| {
        let ours = |name: &&&String| beginnings.iter().any(|beginning| name.starts_with(beginning));
        all.iter().filter(ours).map(|name| (**name).clone()).collect::<Vec<_>>()
    };
    let of = |system: &System| {
        let by = [named(&resources, system.resources), named(&keys, system.keys)].concat();
        (!by.is_empty()).then_some(Request { system: system.name, by })
    };
    SYSTEMS.iter().filter_map(of).collect()
}

/// What becomes of them, in a sentence; `None` where there are none.
#[must_use]
pub fn lost(template: &Value) -> Option<String> {
    let of = |request: &Request| format!("{} ({})", request.system, request.by.join(", "));
    let all = requests(template).iter().map(of).collect::<Vec<_>>().join(" and ");
    (!all.is_empty()).then(|| {
        format!("it requests shares of {all}, which gpu-migrate neither converts nor serves; to convert it request nvidia.com/gpu alone")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_system_is_known_by_what_its_users_write() {
        let limits = |names: &[&str]| {
            let limits =
                names.iter().map(|name| ((*name).to_owned(), json!("1"))).collect::<serde_json::Map<_, _>>();
            json!({"metadata": {}, "spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]}})
        };
        let annotated =
            |key: &str| json!({"metadata": {"annotations": {key: "1"}}, "spec": {"containers": []}});
        for (system, template) in [
            ("HAMi", limits(&["nvidia.com/gpu", "nvidia.com/gpumem"])),
            ("HAMi", limits(&["nvidia.com/gpumem-percentage"])),
            ("vgpu-manager", limits(&["nvidia.com/vgpu-number", "nvidia.com/vgpu-cores"])),
            ("Volcano", limits(&["volcano.sh/vgpu-number"])),
            ("KAI", annotated("gpu-fraction")),
            ("Koordinator", limits(&["koordinator.sh/gpu-core"])),
            ("qGPU", limits(&["tke.cloud.tencent.com/qgpu-core"])),
            ("TensorFusion", annotated("tensor-fusion.ai/tflops-request")),
            ("gpushare (ACK)", limits(&["aliyun.com/gpu-mem"])),
        ] {
            let found = requests(&template).iter().map(|request| request.system).collect::<Vec<_>>();
            assert_eq!(found, [system], "{template}");
        }
        assert_eq!(
            requests(&limits(&["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "tencent.com/vcuda-core"])),
            []
        );
        assert_eq!(lost(&limits(&["nvidia.com/gpu"])), None);
    }
}
