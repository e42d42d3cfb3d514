//! What holds for every pod: the patch applies, nothing legacy is left, sums convert exactly, a second run is empty,
//! and the way back gives the pod as it was written.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Case, namespace, pod, policy};
use gpu_migrate_model::target::Target;
use gpu_migrate_model::units::{Blocks, Cores};
use gpu_migrate_webhook::obstacles::ClusterFacts;
use gpu_migrate_webhook::plan::{Subject, rewrite_template};
use gpu_migrate_webhook::policy::Policies;
use gpu_migrate_webhook::restore::restore;
use gpu_migrate_webhook::review::{Snapshot, answer};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

#[derive(Clone, Debug)]
struct Ask {
    cards: Option<u32>,
    requests_too: bool,
    number: bool,
    cpu: bool,
    env: Option<Vec<Value>>,
}

fn env() -> impl Strategy<Value = Vec<Value>> {
    let entry = prop_oneof![
        3 => "[A-Z]{1,6}".prop_map(|name| json!({"name": name, "value": "v"})),
        1 => prop_oneof!["all", "none", "void", "0,1"].prop_map(|v| json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": v})),
        1 => Just(json!({"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})),
    ];
    prop::collection::vec(entry, 0..5)
}

fn ask() -> impl Strategy<Value = Ask> {
    let cards = prop::option::weighted(0.7, 0_u32..9);
    (cards, any::<bool>(), any::<bool>(), any::<bool>(), prop::option::of(env()))
        .prop_map(|(cards, requests_too, number, cpu, env)| Ask { cards, requests_too, number, cpu, env })
}

fn container(name: String, ask: &Ask) -> Value {
    let mut container = json!({"name": name, "image": "i"});
    let mut map = Map::new();
    if let Some(cards) = ask.cards {
        let value = if ask.number { json!(cards) } else { json!(cards.to_string()) };
        map.insert("nvidia.com/gpu".into(), value);
    }
    if ask.cpu {
        map.insert("cpu".into(), json!("500m"));
    }
    if !map.is_empty() {
        container["resources"] = json!({"limits": map});
        if ask.requests_too {
            container["resources"]["requests"] = Value::Object(map);
        }
    }
    if let Some(env) = &ask.env {
        container["env"] = json!(env);
    }
    container
}

fn tolerations() -> impl Strategy<Value = Value> {
    let one =
        prop_oneof!["nvidia.com/gpu", "pool", "k"].prop_map(|key| json!({"key": key, "operator": "Exists"}));
    prop::collection::vec(one, 0..4).prop_map(Value::Array)
}

fn labels() -> impl Strategy<Value = Value> {
    prop::collection::btree_map(prop_oneof!["gpu-type", "pool", "zone", "a/b", "~tilde"], "[a-z]{1,3}", 0..4)
        .prop_map(|map| json!(map))
}

fn annotations() -> impl Strategy<Value = Value> {
    let key = prop_oneof![
        "own",
        "a/b",
        "tencent.com/predicate-gpu-idx-0",
        "tencent.com/predicate-node",
        "tencent.com/gpu-assigned",
        "gpu-migrate.io/gpu-idx-c0",
        "scheduling.k8s.io/group-name",
    ];
    prop::collection::btree_map(key, "[a-z0-9]{0,4}", 0..4).prop_map(|map| json!(map))
}

fn any_pod() -> impl Strategy<Value = (Value, Vec<Ask>)> {
    let optional = (
        prop::option::of(tolerations()),
        prop::option::of(labels()),
        prop::option::of(annotations()),
        prop::option::of(prop_oneof!["default-scheduler", "volcano", "gpu-migrate-scheduler"]),
    );
    let containers = (prop::collection::vec(ask(), 0..3), prop::collection::vec(ask(), 1..4));
    (containers, optional).prop_map(|((init, app), (tolerations, selector, annotations, scheduler))| {
        let mut spec = json!({});
        let named = |kind: &str, asks: &[Ask]| -> Vec<Value> {
            asks.iter().enumerate().map(|(i, ask)| container(format!("{kind}{i}"), ask)).collect()
        };
        if !init.is_empty() {
            spec["initContainers"] = json!(named("i", &init));
        }
        spec["containers"] = json!(named("c", &app));
        let optional = [
            ("tolerations", tolerations),
            ("nodeSelector", selector),
            ("schedulerName", scheduler.map(Value::from)),
        ];
        for (field, value) in optional {
            if let Some(value) = value {
                spec[field] = value;
            }
        }
        let mut pod = pod(spec);
        if let Some(annotations) = annotations {
            pod["metadata"]["annotations"] = annotations;
        }
        (pod, init.into_iter().chain(app).collect())
    })
}

/// A policy, with the ratio that it promises for one card.
fn any_policy() -> impl Strategy<Value = (Value, u32, u32)> {
    let edits = (
        prop::collection::btree_map(prop_oneof!["pool", "zone", "new/key"], "[a-z]{1,3}", 0..3),
        prop::collection::vec(prop_oneof!["gpu-type", "zone", "a/b"], 0..3),
        tolerations(),
        any::<bool>(),
        prop::option::of(Just("nvidia")),
    );
    (prop_oneof![Just(100_u32), 1_u32..100], 1_u32..400, edits).prop_map(
        |(cores, blocks, (set, remove, add, gate, runtime))| {
            let spec = json!({
                "convert": {"coresPerCard": cores, "blocksPerCard": blocks},
                "scheduling": {
                    "nodeSelector": {"set": set, "remove": remove},
                    "tolerations": {"add": add, "removeKeys": ["nvidia.com/gpu"]},
                    "gangGate": gate, "runtimeClassName": runtime,
                },
            });
            (spec, cores, blocks)
        },
    )
}

/// What the rules promise for a number of cards; written down again here, apart from the code under test.
fn promised(cards: u32, cores: u32, blocks: u32) -> (u32, u32) {
    match cards {
        0 | 1 => (cards * cores, cards * blocks),
        _ if cores == 100 => (cards * 100, cards * blocks),
        _ => (cards * 100, cards * (blocks * 100 / cores)),
    }
}

fn amount(container: &Value, map: &str, name: &str) -> u32 {
    container["resources"][map][name].as_str().map_or(0, |text| text.parse().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn every_pod_converts_exactly_once_and_goes_back(
        (pod, asks) in any_pod(), (mut spec, cores, blocks) in any_policy(), guard in any::<bool>(),
        volcano in any::<bool>(), largest in prop::option::of(1_u64..200_000),
    ) {
        let more: &[(&str, &str)] = if guard { &[("gpu-migrate.io/void-guard", "true")] } else { &[] };
        if volcano {
            spec["scheduling"]["replaceSchedulers"] = json!(["volcano"]);
        }
        let cluster = ClusterFacts { largest_card_mib: largest, ..ClusterFacts::default() };
        let run = |pod: Value| {
            let case = Case::new(pod).policies(vec![policy("p", spec.clone())]).namespace(namespace(more));
            case.cluster(cluster.clone()).run()
        };
        let done = run(pod.clone());
        let cards: u32 = asks.iter().filter_map(|ask| ask.cards).sum();
        // Volcano's pods where the policy lists it; the annotations name no size of a gang.
        let listed = (volcano || pod["spec"]["schedulerName"] != "volcano")
            && pod.pointer("/metadata/annotations/scheduling.k8s.io~1group-name").is_none();
        // A block is 256 MiB, and each card gives as much as the others.
        let fits = asks.iter().filter_map(|ask| ask.cards).filter(|cards| *cards > 0).all(|cards| {
            let of_a_card = u64::from(promised(cards, cores, blocks).1 / cards);
            largest.is_none_or(|largest| of_a_card * 256 <= largest)
        });
        let converts = cards > 0 && listed && fits;
        let expected = if converts { "converted" } else if cards > 0 { "unconvertible" } else { &done.outcome };
        prop_assert_eq!(&done.outcome, expected);

        if converts {
            let text = done.pod["spec"].to_string();
            prop_assert!(!text.contains("\"nvidia.com/gpu\":"), "{}", text);
            let all = ["initContainers", "containers"].map(|list| done.pod["spec"][list].as_array().cloned());
            let containers: Vec<Value> = all.into_iter().flatten().flatten().collect();
            for (container, ask) in containers.iter().zip(&asks) {
                let expected = promised(ask.cards.unwrap_or(0), cores, blocks);
                for map in ["limits", "requests"] {
                    let got = (
                        amount(container, map, "tencent.com/vcuda-core"),
                        amount(container, map, "tencent.com/vcuda-memory"),
                    );
                    let there = map == "limits" || ask.requests_too;
                    prop_assert_eq!(got, if there { expected } else { (0, 0) }, "{} {}", map, container);
                }
            }
        }

        let second = run(done.pod.clone());
        prop_assert!(second.untouched(), "second run: {:?}", second.patch);

        let mut back = done.pod;
        prop_assert_eq!(restore(&mut back).unwrap(), !done.patch.0.is_empty());
        prop_assert_eq!(back, pod);
    }

    /// The same for the targets that are not ours.
    #[test]
    fn every_pod_converts_once_to_each_target_and_goes_back(
        (pod, asks) in any_pod(), (mut spec, cores, blocks) in any_policy(), guard in any::<bool>(),
        labelled in any::<bool>(), target in prop::sample::select(&Target::ALL[1..]),
    ) {
        let mut pod = pod;
        if labelled {
            pod["metadata"]["labels"] = json!({"own": "label"});
        }
        let more: &[(&str, &str)] = if guard { &[("gpu-migrate.io/void-guard", "true")] } else { &[] };
        spec["convert"]["target"] = json!(target);
        let run = |pod: Value| {
            Case::new(pod).policies(vec![policy("p", spec.clone())]).namespace(namespace(more)).run()
        };
        let done = run(pod.clone());
        let asking: Vec<&Ask> = asks.iter().filter(|ask| ask.cards.is_some_and(|cards| cards > 0)).collect();
        let one_share = asking.len() == 1 && asking[0].cards == Some(1) && cores < 100;
        let inits = pod["spec"]["initContainers"].as_array().map_or(0, Vec::len);
        let scheduled_by_default = matches!(pod["spec"]["schedulerName"].as_str(), None | Some("default-scheduler"));
        if one_share && scheduled_by_default && (target != Target::Kai || inits == 0) {
            prop_assert_eq!(&done.outcome, "converted", "{:?}", done.warnings);
        }
        if done.outcome == "converted" {
            let all = ["initContainers", "containers"].map(|list| done.pod["spec"][list].as_array().cloned());
            let containers: Vec<Value> = all.into_iter().flatten().flatten().collect();
            for (container, ask) in containers.iter().zip(&asks).filter(|(_, ask)| ask.cards.is_some_and(|n| n > 0)) {
                let (cores, blocks) = promised(ask.cards.unwrap(), cores, blocks);
                let wanted = target.request(Cores(cores), Blocks(blocks));
                let limits = container["resources"]["limits"].as_object().unwrap();
                for (name, amount) in &wanted.resources {
                    let got = limits.get(name).map(|got| got.as_str().map_or(got.to_string(), str::to_owned));
                    prop_assert_eq!(got, Some(amount.to_string()), "{} {}", name, container);
                }
                let counted = wanted.resources.iter().any(|(name, _)| name == "nvidia.com/gpu");
                prop_assert_eq!(limits.contains_key("nvidia.com/gpu"), counted, "{}", container);
                for (key, value) in &wanted.annotations {
                    prop_assert_eq!(&done.pod["metadata"]["annotations"][key], &json!(value));
                }
            }
            for (key, value) in target.labels() {
                prop_assert_eq!(&done.pod["metadata"]["labels"][key], &json!(value));
            }
        }
        let second = run(done.pod.clone());
        prop_assert!(second.untouched(), "second run: {:?}", second.patch);
        let mut back = done.pod;
        prop_assert_eq!(restore(&mut back).unwrap(), !done.patch.0.is_empty());
        prop_assert_eq!(back, pod);
    }

    #[test]
    fn a_pod_that_is_not_opted_in_is_identical_byte_by_byte(
        (mut pod, _) in any_pod(), way in 0_usize..3, (spec, ..) in any_policy(),
    ) {
        let mut labels = namespace(&[("gpu-migrate.io/void-guard", "true")]);
        match way {
            0 => labels["gpu-migrate.io/opt-in"] = json!("false"),
            1 => labels = json!({"gpu-migrate.io/project": "p"}),
            _ => {
                labels = namespace(&[]);
                pod["metadata"]["labels"] = json!({"gpu-migrate.io/opt-out": "true"});
            }
        }
        let case = Case::new(pod.clone()).policies(vec![policy("p", spec.clone())]).namespace(labels.clone());
        prop_assert!(case.run().untouched());

        let review = json!({
            "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
            "request": {"uid": "u", "operation": "CREATE", "resource": {"group": "", "version": "v1", "resource": "pods"},
                "namespace": "team-a", "object": pod},
        });
        let (policies, _) = gpu_migrate_webhook::policy::Policies::compile(&[policy("p", spec)], &Default::default());
        let labels = std::sync::Arc::new(serde_json::from_value(labels).unwrap());
        let namespaces = [("team-a".to_owned(), labels)].into();
        let snapshot = Snapshot { policies, namespaces, ..Snapshot::default() };
        let answer: Value = serde_json::from_slice(&answer(review.to_string().as_bytes(), &snapshot, None).unwrap().body).unwrap();
        prop_assert_eq!(&answer["response"], &json!({"uid": "u", "allowed": true}));
    }

    /// A percentage covers workloads: whatever revision, run or repeated review, at every namespace-kind-name the decision is one,
    /// it is what `plan` says of the manifest, and a larger percentage only adds.
    #[test]
    fn a_percentage_is_of_workloads(
        name in "[a-z]{1,6}(-[a-z0-9]{1,4}){0,2}", kind in 0_usize..6, percents in (1_u32..100, 1_u32..100),
        revisions in prop::collection::vec(("[bcdf0-9]{8,10}", 28_000_000_u32..31_000_000, any::<u64>()), 2..5),
    ) {
        let (low, high) = (percents.0.min(percents.1), percents.0.max(percents.1));
        let spec = || json!({"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]});
        let owned = |kind: &str, owner: String, uid: u64, labels: Value| json!({
            "metadata": {"generateName": format!("{owner}-"), "labels": labels, "ownerReferences": [
                {"kind": kind, "name": owner, "uid": uid.to_string(), "controller": true}]},
            "spec": spec(),
        });
        // What the controllers of Kubernetes make of an object of this name.
        let (controller, pods): (_, Vec<Value>) = match kind {
            0 | 1 => ("Deployment", revisions.iter().map(|(hash, _, uid)| {
                owned("ReplicaSet", format!("{name}-{hash}"), *uid, json!({"pod-template-hash": hash, "app": name}))
            }).collect()),
            2 => ("CronJob", revisions.iter().map(|(_, minute, uid)| {
                owned("Job", format!("{name}-{minute}"), *uid, json!({"job-name": name}))
            }).collect()),
            3 => ("StatefulSet", revisions.iter().map(|(_, _, uid)| {
                owned("StatefulSet", name.clone(), *uid, json!({"controller-revision-hash": uid.to_string()}))
            }).collect()),
            4 => ("Pod", vec![json!({"metadata": {"name": name}, "spec": spec()}); 2]),
            _ => ("Pod", revisions.iter().map(|(hash, ..)| {
                json!({"metadata": {"generateName": format!("{name}-"), "name": format!("{name}-{hash}")}, "spec": spec()})
            }).collect()),
        };
        let decided = |template: &Value, controller: Option<(&str, &str)>, percent: u32| {
            let (policies, _) = Policies::compile(
                &[policy("p", json!({"rollout": {"percent": percent}}))], &Default::default());
            let labels = serde_json::from_value(namespace(&[])).unwrap();
            let cluster = ClusterFacts::default();
            let subject = Subject { namespace: "team-a", namespace_labels: Some(&labels), controller, cluster: &cluster };
            rewrite_template(template, &subject, &policies).unwrap().outcome.as_str() == "converted"
        };
        let planned = |percent| match controller {
            "Pod" => decided(&pods[0], None, percent),
            kind => decided(&json!({"metadata": {"labels": {"app": name}}, "spec": spec()}), Some((kind, &name)), percent),
        };
        for percent in [low, high] {
            let all: Vec<bool> = pods.iter().map(|pod| decided(pod, None, percent)).collect();
            prop_assert!(all.iter().all(|converted| *converted == planned(percent)), "{controller} {name}: {all:?}");
        }
        prop_assert!(!planned(low) || planned(high), "{controller} {name}: {low} % has it, {high} % has not");
    }
}
