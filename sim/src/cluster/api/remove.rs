//! Deleting: at once, or gracefully where a kubelet or a finalizer has a say.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::ApiServer;
use super::kinds::Kind;
use super::object::{self, items, meta, metadata, timestamp};
use super::request::{Parameters, Target};
use super::status::{self, Refusal};
use super::store::Write;
use super::write::Done;

/// Deletes an object, at once or gracefully.
///
/// # Errors
/// 404, 409 for preconditions that do not hold, 501 for foreground propagation.
pub fn delete(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    options: &Value,
) -> Result<Done, Refusal> {
    let kind = &*target.kind;
    let option = |key: &str| match parameters.get(key) {
        "" => options[key].clone(),
        given => given.parse::<i64>().map_or_else(|_| given.into(), Value::from),
    };
    let propagation = option("propagationPolicy");
    if propagation == "Foreground" {
        return Err(Refusal::not_served(
            "propagationPolicy Foreground; use Background (the default) or Orphan",
        ));
    }
    let grace = option("gracePeriodSeconds").as_u64();
    let mut dry = None;
    let mut going = None;
    let key = (target.namespace.clone(), target.name.clone());
    let result = server.store.change(&kind.id(), &key, |live| {
        let Some(live) = live else { return Err(Refusal::not_found(&kind.qualified(), &target.name)) };
        check_preconditions(kind, live, &options["preconditions"])?;
        if parameters.dry_run() || options["dryRun"][0] == "All" {
            dry = Some(live.clone());
            return Err(Refusal::internal("dry run"));
        }
        Ok(match deletion(kind, live, grace) {
            None => Write::Remove,
            Some(after) => {
                going = Some(());
                Write::Put(after)
            }
        })
    });
    if let Some(object) = dry {
        return Ok(Done::changed(object));
    }
    let object = result?;
    if propagation == "Orphan" {
        server.orphan(object::uid(&object));
    }
    if going.is_some() {
        return Ok(Done::changed(object));
    }
    server.after_delete(kind, &object);
    let answer = status::success(&kind.plural, object::name(&object), object::uid(&object));
    // As a real one: pods are answered as they were, everything else with a Status.
    let answer = if kind.kind == "Pod" { object } else { Arc::new(answer) };
    Ok(Done::changed(answer))
}

fn check_preconditions(kind: &Kind, live: &Value, wanted: &Value) -> Result<(), Refusal> {
    for (key, what) in [("uid", "UID"), ("resourceVersion", "ResourceVersion")] {
        if let Some(wanted) = wanted[key].as_str().filter(|wanted| *wanted != meta(live, key)) {
            return Err(Refusal::conflict(format!(
                "Operation cannot be fulfilled on {} {:?}: the {what} in the precondition ({wanted}) does not match the {what} in record ({}).",
                kind.qualified(),
                object::name(live),
                meta(live, key)
            )));
        }
    }
    Ok(())
}

/// The object while it goes; `None` where it is gone at once.
fn deletion(kind: &Kind, live: &Value, grace: Option<u64>) -> Option<Value> {
    let finalizers = items(&live["metadata"], "finalizers").next().is_some();
    let seconds = match kind.kind.as_str() {
        "Pod" => {
            let finished =
                ["Succeeded", "Failed"].contains(&live["status"]["phase"].as_str().unwrap_or_default());
            let bound = live["spec"]["nodeName"].as_str().is_some_and(|node| !node.is_empty());
            let own = live["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap_or(30);
            if bound && !finished { grace.unwrap_or(own) } else { 0 }
        }
        _ => 0,
    };
    if seconds == 0 && !finalizers {
        return None;
    }
    let mut after = live.clone();
    let now = Timestamp::now();
    let fields = metadata(&mut after);
    if !fields.contains_key("deletionTimestamp") {
        let until = now + jiff::SignedDuration::from_secs(i64::try_from(seconds).unwrap_or(30));
        fields.insert("deletionTimestamp".into(), timestamp(until).into());
        fields.insert("deletionGracePeriodSeconds".into(), json!(seconds));
    }
    Some(after)
}
