//! Bodies as kube-scheduler 1.33 and 1.20 sent them.

use serde_json::Value;

use super::answer::{Kept, Verdict};
use super::*;

fn capture(name: &str) -> (Vec<u8>, Value) {
    let path = format!("{}/tests/captures/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let whole: Value = serde_json::from_slice(&text).unwrap();
    (serde_json::to_vec(&whole["request"]).unwrap(), whole["response"].clone())
}

fn json(answer: &[u8]) -> Value {
    serde_json::from_slice(answer)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(answer)))
}

#[test]
fn names_of_a_filter_are_borrowed_from_the_body() {
    for name in ["filter-names.json", "filter-1.20.json", "prioritize-names.json"] {
        let (body, _) = capture(name);
        let request = Request::parse("filter", &body).unwrap();
        let range = body.as_ptr_range();
        let Nodes::Names(names) = &request.nodes else { panic!("{name}: names expected") };
        assert!(names.iter().all(|name| range.contains(&name.as_ptr())), "{name}");
        assert!(matches!(request.pod.metadata.name.0, std::borrow::Cow::Borrowed(_)));
        let containers = request.pod.spec.containers.as_ref().unwrap();
        assert_eq!(containers[0].amount("tencent.com/vcuda-core"), Ok(50));
    }
}

#[test]
fn a_filter_answer_that_lets_all_pass_is_what_the_scheduler_accepted() {
    for name in
        ["filter-names.json", "filter-nodes.json", "filter-1.20.json", "filter-init-container-only.json"]
    {
        let (body, accepted) = capture(name);
        let request = Request::parse("filter", &body).unwrap();
        let answer = json(&answer::filter(&request.nodes, &vec![Verdict::Fits; request.nodes.len()], &[]));
        assert_eq!(answer["NodeNames"], accepted["NodeNames"], "{name}");
        assert_eq!(answer["Nodes"]["items"], accepted["Nodes"]["items"], "{name}");
        assert_eq!(answer["Error"], "", "{name}");
    }
}

#[test]
fn refusals_are_told_apart_and_a_node_is_in_one_list_only() {
    let (body, _) = capture("filter-names.json");
    let request = Request::parse("filter", &body).unwrap();
    let verdicts = [Verdict::Failed(0), Verdict::Fits, Verdict::Unresolvable(1), Verdict::Failed(0)];
    let reasons = ["say \"when\"".to_owned(), "no card".to_owned()];
    let answer = json(&answer::filter(&request.nodes, &verdicts, &reasons));
    assert_eq!(answer["NodeNames"], serde_json::json!(["fake-b"]));
    assert_eq!(answer["FailedNodes"], serde_json::json!({"fake-a": "say \"when\"", "vm": "say \"when\""}));
    assert_eq!(answer["FailedAndUnresolvableNodes"], serde_json::json!({"fake-c": "no card"}));
}

#[test]
fn no_node_left_is_an_empty_list_and_not_null() {
    let nodes = Nodes::Names(vec!["a"]);
    let answer = json(&answer::filter(&nodes, &[Verdict::Failed(0)], &["full".to_owned()]));
    assert_eq!(answer["NodeNames"], serde_json::json!([]));
}

#[test]
fn an_init_container_counts_as_naming_a_resource() {
    let (body, _) = capture("filter-init-container-only.json");
    let request = Request::parse("filter", &body).unwrap();
    let names =
        |resource| request.pod.containers().any(|(_, c)| c.resource_names().any(|name| name == resource));
    assert!(names("tencent.com/vcuda-core") && !names("nvidia.com/gpu"));
}

#[test]
fn a_whole_node_gives_its_name_and_its_capacity() {
    let (body, _) = capture("filter-nodes.json");
    let request = Request::parse("filter", &body).unwrap();
    let Nodes::Objects(items) = &request.nodes else { panic!("nodes expected") };
    let names: Vec<&str> = items.iter().map(|item| &*item.name).collect();
    assert_eq!(names, ["fake-a", "fake-b", "fake-c", "vm"]);
    let view = items[0].view().unwrap();
    assert_eq!(view.status.capacity.get("tencent.com/vcuda-core").unwrap().as_str(), "800");
    assert!(view.status.capacity.get("cpu").is_some(), "scores look at it");
    assert!(view.status.capacity.get("pods").is_none(), "nobody counts it");
}

#[test]
fn both_forms_of_preemption_name_the_same_victims_and_come_back_in_one() {
    for name in ["preempt-names.json", "preempt-nodes.json"] {
        let (body, accepted) = capture(name);
        let args = PreemptArgs::parse(&body).unwrap();
        assert_eq!(args.pod.spec.priority, Some(1000));
        let kept: Vec<Kept<'_>> = args
            .victims()
            .into_iter()
            .map(|v| Kept { node: v.node, uids: v.uids, pdb_violations: v.pdb_violations })
            .collect();
        assert_eq!(json(&answer::preemption(&kept)), accepted, "{name}");
    }
}

#[test]
fn a_binding_names_pod_uid_and_node() {
    let (body, accepted) = capture("bind.json");
    let args = BindArgs::parse(&body).unwrap();
    assert_eq!((args.pod_name, args.pod_namespace, args.node), ("x7", "default", "fake-b"));
    assert_eq!(args.pod_uid, "2cac1de4-67d9-41ab-9c59-05a21cfd5041");
    assert_eq!(json(&answer::binding(None)), accepted);
    assert_eq!(json(&answer::binding(Some("a\u{1}b")))["Error"], "a\u{1}b");
}

#[test]
fn a_score_beyond_ten_is_ten() {
    let answer = json(&answer::priorities(&Nodes::Names(vec!["a", "b"]), &[3, 99]));
    assert_eq!(answer, serde_json::json!([{"Host": "a", "Score": 3}, {"Host": "b", "Score": 10}]));
}

#[test]
fn a_bad_body_is_named() {
    let table: [(&[u8], &str); 4] = [
        (b"", "ExtenderArgs"),
        (b"{\"Pod\":{\"metadata\":{},\"spec\":{}},\"Nodes\":null,\"NodeNames\":null}", "both null"),
        (
            b"{\"Pod\":{\"metadata\":{},\"spec\":{}},\"Nodes\":{\"items\":[{\"metadata\":{}}]}}",
            "metadata.name",
        ),
        (b"{\"Pod\":{\"metadata\":{},\"spec\":{\"containers\":3}},\"NodeNames\":[]}", "invalid type"),
    ];
    for (body, expected) in table {
        let error = Request::parse("filter", body).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(BindArgs::parse(b"{\"PodName\":\"a\"}").unwrap_err().to_string().contains("PodNamespace"));
}
