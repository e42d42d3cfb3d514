//! Creating, updating and patching: what changes objects. Each change is decided and stored under the store's one lock;
//! only webhooks are called outside of it, before.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use super::admission::{self, Creation};
use super::apply::{Writer, apply, record_update};
use super::kinds::Kind;
use super::object::{self, items, meta, metadata, timestamp};
use super::request::{Parameters, Target, check_shape};
use super::status::Refusal;
use super::store::{ResourceId, Write};
use super::{ApiServer, defaults, events, scale, schema, strategic};

/// A stored or removed object, with warnings for its author.
#[derive(Debug)]
pub struct Done {
    pub object: Arc<Value>,
    pub created: bool,
    pub warnings: Vec<String>,
}

impl Done {
    pub(super) fn changed(object: Arc<Value>) -> Self {
        Self { object, created: false, warnings: Vec::new() }
    }
}

/// Stores a new object.
///
/// # Errors
/// What is wrong with it.
pub async fn create(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    body: Value,
) -> Result<Done, Refusal> {
    check_shape(&body)?;
    let kind = &*target.kind;
    let mut new = body;
    if kind.ignores_nulls() {
        object::drop_nulls(&mut new);
    }
    if new.get("metadata").is_none() && kind.kind != "Event" {
        return Err(Refusal::bad_request("metadata: expected an object with name or generateName"));
    }
    begin(kind, &target.namespace, &mut new)?;
    let unknown = schema::prune(kind, &mut new);
    let mut warnings = told_of(&unknown, target, parameters)?;
    let namespace = server.labels_of_namespace(kind, &target.namespace)?;
    let status = std::mem::take(&mut new["status"]);
    defaults::fill(kind, &mut new);
    let creation = Creation { kind, namespace: namespace.as_ref(), dry_run: parameters.dry_run() };
    let configurations = server.webhooks();
    let refill = |object: &mut Value| defaults::fill(kind, object);
    warnings.extend(admission::mutate(&configurations, creation, &mut new, refill).await?);
    check_shape(&new)?;
    // A kind with a status subresource starts without one; the simulated nodes' capacity goes through it too.
    if !kind.has("status") && !status.is_null() {
        new["status"] = status;
    }
    if kind.has("status") && kind.kind != "Pod" && kind.kind != "Namespace" {
        object::map(&mut new).remove("status");
    }
    if new["status"].is_null() {
        object::map(&mut new).remove("status");
    }
    if kind.has("status") {
        metadata(&mut new).insert("generation".into(), 1.into());
    }
    server.check(kind, &new)?;
    let generated = meta(&new, "name").is_empty();
    if generated {
        let name = format!("{}{}", meta(&new, "generateName"), object::new_suffix());
        metadata(&mut new).insert("name".into(), name.into());
    }
    defaults::check(kind, &new)?;
    schema::check(kind, &new, None)?;
    let api_version = kind.api_version();
    let writer = writer(parameters, target, &api_version);
    metadata(&mut new).remove("managedFields");
    record_update(None, &mut new, &writer);
    finish_create(server, target, parameters, new).map(|object| Done { object, created: true, warnings })
}

/// What a request is told of the fields that the schema does not know: a refusal (`fieldValidation=Strict`, kubectl's default),
/// warnings (the API's default), or nothing.
fn told_of(unknown: &[String], target: &Target, parameters: &Parameters) -> Result<Vec<String>, Refusal> {
    let texts: Vec<String> = unknown.iter().map(|field| format!("unknown field {field:?}")).collect();
    let kind = &*target.kind;
    match parameters.get("fieldValidation") {
        "Strict" if !texts.is_empty() => {
            let error = format!("strict decoding error: {}", texts.join(", "));
            Err(if parameters.media.contains("patch") {
                Refusal::invalid(&kind.kind, &target.name, "patch", &format!("Invalid value: {error}"))
            } else {
                let (kind, version) = (&kind.kind, &kind.version);
                Refusal::bad_request(format!(
                    "{kind} in version {version:?} cannot be handled as a {kind}: {error}"
                ))
            })
        }
        "Strict" | "Ignore" => Ok(Vec::new()),
        _ => Ok(texts),
    }
}

/// Refuses a configuration to apply that has fields which the schema does not know: to server-side apply they never were a warning.
fn check_fields(target: &Target, configuration: &Value) -> Result<(), Refusal> {
    let kind = &*target.kind;
    let unknown = schema::prune(kind, &mut configuration.clone());
    if unknown.is_empty() {
        return Ok(());
    }
    let fields: Vec<String> =
        unknown.iter().map(|field| format!(".{field}: field not declared in schema")).collect();
    let of = format!("{}/{}; {}, Kind={}", target.namespace, target.name, kind.api_version(), kind.kind);
    Err(Refusal::bad_request(format!("failed to create typed patch object ({of}): {}", fields.join(", "))))
}

/// Identity and birth of an object.
fn begin(kind: &Kind, namespace: &str, new: &mut Value) -> Result<(), Refusal> {
    new["kind"] = kind.kind.clone().into();
    new["apiVersion"] = kind.api_version().into();
    let given = meta(new, "namespace").to_owned();
    if !given.is_empty() && given != namespace {
        let problem = "the namespace of the provided object does not match the namespace sent on the request";
        return Err(Refusal::bad_request(problem));
    }
    if kind.namespaced && namespace.is_empty() {
        return Err(Refusal::bad_request("an object of this kind is created in a namespace"));
    }
    if meta(new, "name").is_empty() && meta(new, "generateName").is_empty() {
        return Err(Refusal::invalid(
            &kind.kind,
            "",
            "metadata.name",
            "Required value: name or generateName is required",
        ));
    }
    if !meta(new, "resourceVersion").is_empty() {
        return Err(Refusal::bad_request("resourceVersion should not be set on objects to be created"));
    }
    let fields = metadata(new);
    if kind.namespaced {
        fields.insert("namespace".into(), namespace.into());
    }
    fields.retain(|_, value| !value.is_null());
    fields.remove("deletionTimestamp");
    fields.insert("uid".into(), object::new_uid().into());
    fields.insert("creationTimestamp".into(), timestamp(Timestamp::now()).into());
    Ok(())
}

fn finish_create(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    new: Value,
) -> Result<Arc<Value>, Refusal> {
    let new = events::stored(&target.kind, new);
    let key = (meta(&new, "namespace").to_owned(), meta(&new, "name").to_owned());
    if parameters.dry_run() {
        if server.store.get(&target.kind.id(), &key.0, &key.1).is_some() {
            return Err(Refusal::exists(&target.kind.qualified(), &key.1));
        }
        return Ok(Arc::new(new));
    }
    let stored = server.store.change(&target.kind.id(), &key, |there| match there {
        Some(_) => Err(Refusal::exists(&target.kind.qualified(), &key.1)),
        None => Ok(Write::Put(new)),
    })?;
    server.after_write(&target.kind, &stored);
    Ok(stored)
}

fn writer<'a>(parameters: &'a Parameters, target: &'a Target, api_version: &'a str) -> Writer<'a> {
    Writer {
        manager: parameters.manager(),
        subresource: &target.subresource,
        api_version,
        now: Timestamp::now(),
    }
}

/// Replaces an object.
///
/// # Errors
/// 404, 409 where it has changed since it was read, 422.
pub fn update(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    body: Value,
) -> Result<Done, Refusal> {
    check_shape(&body)?;
    modify(server, target, parameters, |_| Ok(body))
}

/// Changes an object in one of the four forms of patch.
///
/// # Errors
/// 404, 409, 415 for a form that the kind does not take, 422 for a patch that does not fit.
pub async fn patch(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    body: Value,
) -> Result<Done, Refusal> {
    match parameters.media.as_str() {
        "application/json-patch+json" => {
            let patch: json_patch::Patch =
                serde_json::from_value(body).map_err(|error| Refusal::bad_request(error.to_string()))?;
            modify(server, target, parameters, |live| {
                let mut after = live.clone();
                json_patch::patch(&mut after, &patch).map_err(|error| {
                    Refusal::invalid(&target.kind.kind, &target.name, "patch", &error.to_string())
                })?;
                Ok(after)
            })
        }
        "application/merge-patch+json" => modify(server, target, parameters, |live| {
            let mut after = live.clone();
            json_patch::merge(&mut after, &body);
            Ok(after)
        }),
        "application/strategic-merge-patch+json" if target.kind.custom.is_none() => {
            modify(server, target, parameters, |live| {
                let mut after = live.clone();
                strategic::apply(&mut after, &body);
                Ok(after)
            })
        }
        "application/apply-patch+yaml" | "application/apply-patch+cbor" => {
            apply_configuration(server, target, parameters, body).await
        }
        _ => Err(Refusal::media_type(
            "the body of the request was in an unknown format - accepted media types include: \
             application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
        )),
    }
}

async fn apply_configuration(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    mut configuration: Value,
) -> Result<Done, Refusal> {
    check_shape(&configuration)?;
    if parameters.get("fieldManager").is_empty() {
        return Err(Refusal::bad_request("fieldManager is required for apply patch"));
    }
    if configuration["metadata"]
        .get("managedFields")
        .is_some_and(|f| f.as_array().is_some_and(|l| !l.is_empty()))
    {
        return Err(Refusal::bad_request("metadata.managedFields must be nil"));
    }
    if target.subresource == "scale" {
        return Err(Refusal::not_served("server-side apply of a Scale; patch or replace it"));
    }
    if target.kind.ignores_nulls() {
        object::drop_nulls(&mut configuration);
    }
    limit_to_subresource(target, &mut configuration);
    check_fields(target, &configuration)?;
    let key = (target.namespace.clone(), target.name.clone());
    if server.store.get(&target.kind.id(), &key.0, &key.1).is_none() {
        if !target.subresource.is_empty() {
            return Err(Refusal::not_found(&target.kind.qualified(), &target.name));
        }
        metadata(&mut configuration).insert("name".into(), target.name.clone().into());
        return create_by_apply(server, target, parameters, configuration).await;
    }
    let force = parameters.flag("force");
    let api_version = target.kind.api_version();
    let writer = writer(parameters, target, &api_version);
    store_change(server, target, parameters, |live| apply(Some(live), &configuration, &writer, force))
}

async fn create_by_apply(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    configuration: Value,
) -> Result<Done, Refusal> {
    let done = create(server, target, parameters, configuration.clone()).await?;
    let api_version = target.kind.api_version();
    let writer = writer(parameters, target, &api_version);
    // What the author asked for is theirs by apply; what defaults and webhooks added is nobody's.
    let mut bare = events::shown(&target.kind, &done.object).into_owned();
    metadata(&mut bare).remove("managedFields");
    let owned = apply(Some(&bare), &configuration, &writer, true)?;
    if parameters.dry_run() {
        return Ok(Done { object: Arc::new(events::stored(&target.kind, owned)), ..done });
    }
    let key = (target.namespace.clone(), target.name.clone());
    let fields = owned["metadata"]["managedFields"].clone();
    let object = server.store.change(&target.kind.id(), &key, |live| match live {
        None => Err(Refusal::not_found(&target.kind.qualified(), &target.name)),
        Some(live) => {
            let mut after = Value::clone(live);
            metadata(&mut after).insert("managedFields".into(), fields);
            Ok(Write::Put(after))
        }
    })?;
    Ok(Done { object, ..done })
}

/// Through `/status` only the status is applied, through the main door never (if there is the other).
fn limit_to_subresource(target: &Target, configuration: &mut Value) {
    if target.subresource == "status" {
        object::map(configuration)
            .retain(|key, _| ["apiVersion", "kind", "metadata", "status"].contains(&key.as_str()));
        metadata(configuration)
            .retain(|key, _| ["name", "namespace", "resourceVersion", "uid"].contains(&key.as_str()));
    } else if target.kind.has("status") {
        object::map(configuration).remove("status");
    }
}

fn modify(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    change: impl FnOnce(&Value) -> Result<Value, Refusal>,
) -> Result<Done, Refusal> {
    let api_version = target.kind.api_version();
    let writer = writer(parameters, target, &api_version);
    let mut warnings = Vec::new();
    let done = store_change(server, target, parameters, |live| {
        let mut after = if target.subresource == "scale" {
            scale::put(live, &change(&scale::of(live))?)?
        } else {
            change(live)?
        };
        if target.kind.ignores_nulls() {
            object::drop_nulls(&mut after);
        }
        warnings = told_of(&schema::prune(&target.kind, &mut after), target, parameters)?;
        let fields = live["metadata"].get("managedFields").cloned();
        match fields {
            Some(fields) => metadata(&mut after).insert("managedFields".into(), fields),
            None => metadata(&mut after).remove("managedFields"),
        };
        let after = keep_what_is_not_theirs(target, live, after);
        let mut after = after;
        record_update(Some(live), &mut after, &writer);
        Ok(after)
    })?;
    Ok(Done { warnings, ..done })
}

/// Puts back what this door may not change.
fn keep_what_is_not_theirs(target: &Target, live: &Value, mut after: Value) -> Value {
    let mut keep = |from: &Value, key: &str| match from.get(key) {
        Some(value) => object::map(&mut after).insert(key.into(), value.clone()),
        None => object::map(&mut after).remove(key),
    };
    if target.subresource == "status" {
        let all: Vec<String> = live.as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect();
        for key in all.iter().filter(|key| *key != "status" && *key != "metadata") {
            keep(live, key);
        }
        let version = meta(&after, "resourceVersion").to_owned();
        after["metadata"] = live["metadata"].clone();
        if !version.is_empty() {
            metadata(&mut after).insert("resourceVersion".into(), version.into());
        }
    } else if target.kind.has("status") {
        keep(live, "status");
    }
    after
}

/// Stores what `change` makes of the live object, with the rules that hold for every change.
fn store_change(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    change: impl FnOnce(&Value) -> Result<Value, Refusal>,
) -> Result<Done, Refusal> {
    let kind = &*target.kind;
    let key = (target.namespace.clone(), target.name.clone());
    let mut dry = None;
    let id: ResourceId = kind.id();
    let result = server.store.change(&id, &key, |live| {
        let Some(live) = live else { return Err(Refusal::not_found(&kind.qualified(), &target.name)) };
        let live = &*events::shown(kind, live);
        let mut after = change(live)?;
        check_shape(&after)?;
        if target.subresource.is_empty() {
            defaults::fill(kind, &mut after);
        }
        settle_identity(kind, live, &mut after)?;
        server.check(kind, &after)?;
        defaults::check(kind, &after)?;
        schema::check(kind, &after, Some(live))?;
        let after = events::stored(kind, after);
        if parameters.dry_run() {
            dry = Some(Arc::new(after));
            return Err(Refusal::internal("dry run"));
        }
        let going = !meta(&after, "deletionTimestamp").is_empty();
        let held = items(&after["metadata"], "finalizers").next().is_some();
        let released = items(&live["metadata"], "finalizers").next().is_some() && !held;
        Ok(if going && released { Write::Remove } else { Write::Put(after) })
    });
    if let Some(object) = dry {
        return Ok(Done::changed(object));
    }
    let stored = result?;
    server.after_write(kind, &stored);
    Ok(Done::changed(stored))
}

/// What no change may change; and the generation, which counts changes of the specification.
fn settle_identity(kind: &Kind, live: &Value, after: &mut Value) -> Result<(), Refusal> {
    let given = meta(after, "resourceVersion").to_owned();
    if !given.is_empty() && given != meta(live, "resourceVersion") {
        return Err(Refusal::conflict(format!(
            "Operation cannot be fulfilled on {} \"{}\": the object has been modified; please apply your changes to the latest version and try again",
            kind.qualified(),
            object::name(live)
        )));
    }
    let uid = meta(after, "uid");
    if !uid.is_empty() && uid != object::uid(live) {
        return Err(Refusal::conflict(format!(
            "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
            object::uid(live)
        )));
    }
    after["kind"] = live["kind"].clone();
    after["apiVersion"] = live["apiVersion"].clone();
    let fields = metadata(after);
    for key in [
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "generation",
        "generateName",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    ] {
        match live["metadata"].get(key) {
            Some(value) => fields.insert(key.into(), value.clone()),
            None => fields.remove(key),
        };
    }
    fields.retain(|_, value| !value.is_null());
    let bare = |object: &Value| {
        let mut object = object.clone();
        object::map(&mut object).retain(|key, _| key != "metadata" && key != "status");
        object
    };
    if kind.has("status") && bare(live) != bare(after) {
        let generation = live["metadata"]["generation"].as_i64().unwrap_or(0) + 1;
        metadata(after).insert("generation".into(), generation.into());
    }
    Ok(())
}
