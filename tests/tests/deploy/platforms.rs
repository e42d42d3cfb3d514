//! What is said about platforms that are not at hand, as far as it can be held: values are values, and OpenShift's constraints admit the pods.

use std::{collections::BTreeSet, fs};

use super::*;

/// The YAML blocks of docs/platforms.md whose first line is this comment.
fn blocks(kind: &str) -> Vec<String> {
    let text = fs::read_to_string(deploy().join("../docs/platforms.md")).unwrap();
    let blocks = text.split("\n```yaml\n").skip(1).map(|rest| rest.split("\n```").next().unwrap().to_owned());
    blocks.filter(|block| block.starts_with(&format!("# {kind}\n"))).collect()
}

#[test]
fn the_documented_values_are_ones_and_do_something() {
    let blocks = blocks("values");
    assert_eq!(blocks.len(), 4);
    let Some(default) = template("1.33.0", &[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("values.yaml");
    for block in blocks {
        fs::write(&file, &block).unwrap();
        let rendered = template("1.33.0", &["--values", file.to_str().unwrap()]).unwrap();
        assert_ne!(rendered, default, "{block}");
    }
}

/// GKE's quota is for the classes that the chart names.
#[test]
fn the_documented_quota_has_the_charts_priority_classes() {
    let block = blocks("manifest").remove(0);
    let quota: Value = serde_saphyr::from_str(&block).unwrap();
    assert_eq!(quota["metadata"]["namespace"], read("base/namespace.yaml")[0]["metadata"]["name"]);
    let classes = strings(&quota["spec"]["scopeSelector"]["matchExpressions"][0]["values"]);
    let used: BTreeSet<String> = all()
        .iter()
        .filter_map(|object| {
            object.pointer("/spec/template/spec/priorityClassName")?.as_str().map(str::to_owned)
        })
        .collect();
    assert_eq!(classes.into_iter().map(str::to_owned).collect::<BTreeSet<_>>(), used);
}

#[test]
fn openshifts_constraints_admit_our_pods() {
    let files = read("openshift/scc.yaml");
    let (binding, constraints) =
        (of_kind(&files, "RoleBinding")[0], of_kind(&files, "SecurityContextConstraints")[0]);
    let subjects = binding["subjects"].as_array().unwrap().iter();
    let unprivileged: BTreeSet<&str> = subjects.map(|subject| subject["name"].as_str().unwrap()).collect();
    let mut accounts = BTreeSet::new();
    let rendered = rendered_with_hooks(&[]).unwrap_or_default();
    for object in all().iter().chain(rendered.iter().filter(|object| hook(object).is_some())) {
        let pod = if object["kind"] == "Pod" {
            Some(&object["spec"])
        } else {
            object.pointer("/spec/template/spec")
        };
        let Some((pod, account)) =
            pod.and_then(|pod| Some((pod, pod["serviceAccountName"].as_str()?.to_owned())))
        else {
            continue;
        };
        let mut volumes =
            pod["volumes"].as_array().into_iter().flatten().map(|volume| {
                volume.as_object().unwrap().keys().find(|key| *key != "name").unwrap().to_owned()
            });
        if account == "gpu-migrate-bridge" {
            let allowed = strings(&constraints["volumes"]);
            assert!(volumes.all(|kind| allowed.contains(&kind.as_str())), "{pod}");
            // The account's token.
            assert!(allowed.contains(&"projected"));
            assert_eq!(constraints["runAsUser"]["type"], "RunAsAny");
            assert_eq!(
                constraints["users"][0],
                format!("system:serviceaccount:gpu-migrate-system:{account}")
            );
            for (asked, allowed) in [
                (&pod["hostPID"], "allowHostPID"),
                (&pod["hostNetwork"], "allowHostNetwork"),
                (&pod["hostIPC"], "allowHostIPC"),
            ] {
                assert!(asked.is_null() || constraints[allowed] == true, "{allowed}");
            }
            assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
            assert_eq!(strings(&constraints["seccompProfiles"]), ["runtime/default"]);
            let security = &pod["containers"][0]["securityContext"];
            assert_eq!(security["capabilities"]["drop"], constraints["requiredDropCapabilities"]);
            for (asked, allowed) in [("readOnlyRootFilesystem", true), ("allowPrivilegeEscalation", false)] {
                assert_eq!(
                    (&security[asked], &constraints[asked]),
                    (&allowed.into(), &allowed.into()),
                    "{asked}"
                );
            }
        } else {
            // nonroot-v2: no hostPath, no root.
            assert!(volumes.all(|kind| kind != "hostPath"), "{account}");
            assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{account}");
            assert!(unprivileged.contains(account.as_str()), "{account} may use no constraints");
        }
        accounts.insert(account);
    }
    let hooks = usize::from(!rendered.is_empty());
    assert_eq!(
        accounts.len(),
        unprivileged.len() + hooks,
        "an account too many, or a pod too few: {accounts:?}"
    );
}
