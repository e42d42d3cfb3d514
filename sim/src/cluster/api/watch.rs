//! Watches: first what is there (if asked for), then every change, with bookmarks in between, until the client goes, the time is
//! up, or the log has forgotten what comes next (410, as an ERROR event).

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::stream;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::events;
use super::kinds::Kind;
use super::request::{Form, Parameters, Target};
use super::select::Selector;
use super::status::Refusal;
use super::store::{Change, Event, Store};
use super::table;

/// How often a quiet watch that asked for bookmarks gets one.
const BOOKMARK: Duration = Duration::from_secs(10);
/// How long a watch lives whose client does not say.
const LONGEST: Duration = Duration::from_secs(1800);

/// The view of one watch on the changes of a resource.
#[derive(Debug)]
struct View {
    kind: Arc<Kind>,
    namespace: Option<String>,
    name: Option<String>,
    selector: Selector,
    form: Form,
    include: String,
}

impl View {
    fn sees(&self, object: &Value) -> bool {
        let object = &*events::shown(&self.kind, object);
        let meta = |key| super::object::meta(object, key);
        self.namespace.as_deref().is_none_or(|namespace| namespace == meta("namespace"))
            && self.name.as_deref().is_none_or(|name| name == meta("name"))
            && self.selector.matches(object)
    }

    /// A change as this watch sees it: an object may come into view or leave it by a mere modification.
    fn event(&self, event: &Event) -> Option<Value> {
        let before = event.before.as_ref().is_some_and(|object| self.sees(object));
        let now = event.change != Change::Deleted && self.sees(&event.object);
        let kind = match (before, now) {
            (false, false) => return None,
            (false, true) => "ADDED",
            (true, true) => "MODIFIED",
            (true, false) => "DELETED",
        };
        Some(json!({"type": kind, "object": self.render(&event.object)}))
    }

    fn render(&self, object: &Value) -> Value {
        let object = &*events::shown(&self.kind, object);
        match self.form {
            Form::Whole => object.clone(),
            Form::Partial => table::partial(object),
            Form::Table => {
                let version = super::object::meta(object, "resourceVersion");
                table::render(&self.kind, &[object], version, &self.include, jiff::Timestamp::now())
            }
        }
    }

    fn bookmark(&self, revision: u64, initial_end: bool) -> Value {
        let mut metadata = json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
        if initial_end {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        let object = match self.form {
            Form::Whole => {
                json!({"kind": self.kind.kind, "apiVersion": self.kind.api_version(), "metadata": metadata})
            }
            Form::Partial => {
                json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata})
            }
            Form::Table => json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
                "columnDefinitions": [], "rows": []}),
        };
        json!({"type": "BOOKMARK", "object": object})
    }
}

struct Stream {
    store: Arc<Store>,
    changes: tokio::sync::watch::Receiver<u64>,
    view: View,
    revision: u64,
    ready: VecDeque<Value>,
    bookmarks: bool,
    next_bookmark: Instant,
    end: Instant,
    over: bool,
}

/// Opens a watch.
///
/// # Errors
/// 400 for parameters that cannot be read.
pub fn open(store: Arc<Store>, target: &Target, parameters: &Parameters) -> Result<Body, Refusal> {
    let view = View {
        kind: target.kind.clone(),
        namespace: (!target.namespace.is_empty()).then(|| target.namespace.clone()),
        name: (!target.name.is_empty()).then(|| target.name.clone()),
        selector: parameters.selector()?,
        form: parameters.form,
        include: parameters.get("includeObject").to_owned(),
    };
    let asked = parameters.get("resourceVersion");
    let from: u64 = if asked.is_empty() {
        0
    } else {
        asked
            .parse()
            .map_err(|_| Refusal::bad_request(format!("resourceVersion: Invalid value: {asked:?}")))?
    };
    let seconds = parameters.get("timeoutSeconds").parse().ok().filter(|seconds| *seconds > 0);
    let life = seconds.map_or(LONGEST, Duration::from_secs);
    // Subscribed before the first look: what happens in between wakes it.
    let changes = store.changes();
    let mut stream = Stream {
        changes,
        revision: from,
        ready: VecDeque::new(),
        bookmarks: parameters.flag("allowWatchBookmarks"),
        next_bookmark: Instant::now() + BOOKMARK,
        end: Instant::now() + life,
        over: false,
        view,
        store,
    };
    let initial = parameters.flag("sendInitialEvents");
    if from == 0 || initial {
        stream.begin_with_what_is_there(initial);
    }
    let lines = stream::unfold(stream, |mut stream| async move {
        let event = stream.next().await?;
        let mut line = event.to_string();
        line.push('\n');
        Some((Ok::<_, Infallible>(Bytes::from(line)), stream))
    });
    Ok(Body::from_stream(lines))
}

impl Stream {
    fn begin_with_what_is_there(&mut self, say_when_done: bool) {
        let (objects, revision) = self.store.list(&self.view.kind.id(), self.view.namespace.as_deref());
        let added = objects.iter().filter(|object| self.view.sees(object));
        self.ready =
            added.map(|object| json!({"type": "ADDED", "object": self.view.render(object)})).collect();
        self.revision = revision;
        if say_when_done {
            self.ready.push_back(self.view.bookmark(revision, true));
        }
    }

    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.over {
                return None;
            }
            self.changes.borrow_and_update();
            match self.store.since(&self.view.kind.id(), self.revision) {
                Err(refusal) => {
                    self.over = true;
                    return Some(json!({"type": "ERROR", "object": refusal.to_value()}));
                }
                Ok((events, revision)) => {
                    self.revision = revision;
                    self.ready.extend(events.iter().filter_map(|event| self.view.event(event)));
                }
            }
            if !self.ready.is_empty() {
                continue;
            }
            tokio::select! {
                changed = self.changes.changed() => self.over |= changed.is_err(),
                () = tokio::time::sleep_until(self.end) => {
                    self.over = true;
                    self.push_bookmark();
                }
                () = tokio::time::sleep_until(self.next_bookmark), if self.bookmarks => self.push_bookmark(),
            }
        }
    }

    fn push_bookmark(&mut self) {
        self.next_bookmark = Instant::now() + BOOKMARK;
        if self.bookmarks {
            self.ready.push_back(self.view.bookmark(self.revision, false));
        }
    }
}
