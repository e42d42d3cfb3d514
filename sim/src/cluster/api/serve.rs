//! HTTP in front of the server: from a request to one of its verbs, and from the outcome to an answer.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::kinds::Kinds;
use super::request::{self, Form, Parameters, Target, Verb};
use super::status::Refusal;
use super::store::version;
use super::{ApiServer, bind, discovery, events, object, remove, scale, table, watch, write};

/// Largest body: as etcd would take it.
const LARGEST_BODY: usize = 3 << 20;

/// The server could not be started.
#[derive(Debug, thiserror::Error)]
#[error("the embedded API server cannot listen on {address}: {source}")]
pub struct ServeError {
    address: SocketAddr,
    source: std::io::Error,
}

/// A server that is being served.
#[derive(Clone, Debug)]
pub struct Running {
    pub server: Arc<ApiServer>,
    pub address: SocketAddr,
}

impl ApiServer {
    /// Serves on a port of loopback (0: any free one) until `stop`.
    ///
    /// # Errors
    /// [`ServeError`] where the port is taken.
    pub async fn serve(self, port: u16, stop: CancellationToken) -> Result<Running, ServeError> {
        let wanted = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let cannot = |source| ServeError { address: wanted, source };
        let listener = TcpListener::bind(wanted).await.map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let server = Arc::new(self);
        let router = Router::new().fallback(handle).with_state(server.clone());
        tokio::spawn(async move {
            let serving = axum::serve(listener, router);
            tokio::select! {
                result = serving.into_future() => if let Err(error) = result {
                    tracing::error!(%error, "the embedded API server ended");
                },
                () = stop.cancelled() => {}
            }
        });
        Ok(Running { server, address })
    }
}

impl Running {
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A kubeconfig for it: kubectl, kube-rs, anything.
    #[must_use]
    pub fn kubeconfig(&self) -> String {
        let url = self.url();
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: demo\n\
             clusters: [{{name: demo, cluster: {{server: \"{url}\"}}}}]\n\
             users: [{{name: demo, user: {{}}}}]\n\
             contexts: [{{name: demo, context: {{cluster: demo, user: demo, namespace: default}}}}]\n"
        )
    }

    /// A client for it.
    ///
    /// # Errors
    /// Where the client cannot be made.
    pub fn client(&self) -> Result<kube::Client, kube::Error> {
        // The URL is an address we bound: it parses.
        let uri = self
            .url()
            .parse()
            .map_err(|error: http::uri::InvalidUri| kube::Error::HttpError(error.into()))?;
        let mut config = kube::Config::new(uri);
        config.default_namespace = "default".into();
        kube::Client::try_from(config)
    }
}

async fn handle(State(server): State<Arc<ApiServer>>, request: Request) -> Response {
    match answer(&server, request).await {
        Ok(response) => response,
        Err(refusal) => refusal.into_response(),
    }
}

async fn answer(server: &ApiServer, request: Request) -> Result<Response, Refusal> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    if ["/livez", "/readyz", "/healthz"].contains(&path) {
        return Ok("ok".into_response());
    }
    let parameters = Parameters::of(&parts.uri, &parts.headers);
    if parts.method == http::Method::GET
        && let Some(answer) = discovery::answer(path, &server.kinds)
    {
        return Ok(json_response(StatusCode::OK, &answer));
    }
    let bytes =
        to_bytes(body, LARGEST_BODY).await.map_err(|error| Refusal::bad_request(error.to_string()))?;
    if path.ends_with("/selfsubjectaccessreviews") && parts.method == http::Method::POST {
        // Everybody may do everything here, and is told so.
        let mut review = request::body(&bytes, &parameters.media)?;
        request::check_shape(&review)?;
        review["status"] = json!({"allowed": true, "reason": "the embedded API server has no authorization"});
        return Ok(json_response(StatusCode::CREATED, &review));
    }
    if parts.method == http::Method::GET
        && !parameters.flag("watch")
        && let Some(list) = empty_list(path)
    {
        return Ok(json_response(StatusCode::OK, &list));
    }
    let target = Target::of(path, &server.kinds)?;
    let verb = Verb::of(&parts.method, &target, &parameters)?;
    let body = request::body(&bytes, &parameters.media)?;
    act(server, verb, &target, &parameters, body).await
}

/// A list of what there is none of.
fn empty_list(path: &str) -> Option<Value> {
    let parts: Vec<&str> = path.split('/').collect();
    let (["", "api", "v1", plural] | ["", "api", "v1", "namespaces", _, plural]) = parts.as_slice() else {
        return None;
    };
    let kind = Kinds::none_of("", plural)?;
    Some(json!({"apiVersion": "v1", "kind": format!("{kind}List"), "metadata": {}, "items": []}))
}

async fn act(
    server: &ApiServer,
    verb: Verb,
    target: &Target,
    parameters: &Parameters,
    body: Value,
) -> Result<Response, Refusal> {
    let done = match (verb, target.subresource.as_str()) {
        (Verb::Watch, _) => return watch_response(server, target, parameters),
        (Verb::Get, "log") => return Err(Refusal::not_served("logs: simulated containers print nothing")),
        (Verb::Get, _) => return get(server, target, parameters),
        (Verb::List, _) => return list(server, target, parameters),
        (Verb::Create, "binding") => bind::bind(server, target, &body)?,
        (Verb::Create, "eviction") => evict(server, target, parameters, &body)?,
        (Verb::Create, "") => write::create(server, target, parameters, body).await?,
        (Verb::Update, "" | "status" | "scale") => write::update(server, target, parameters, body)?,
        (Verb::Patch, "" | "status" | "scale") => write::patch(server, target, parameters, body).await?,
        (Verb::Delete, "") => remove::delete(server, target, parameters, &body)?,
        (Verb::DeleteAll, "") => return delete_all(server, target, parameters, &body),
        _ => return Err(Refusal::method()),
    };
    let code = if done.created { StatusCode::CREATED } else { StatusCode::OK };
    let mut response = render(target, parameters, code, &done.object);
    for warning in &done.warnings {
        let text = warning.replace('\n', " ").replace('\\', "\\\\").replace('"', "\\\"");
        if let Ok(value) = HeaderValue::from_str(&format!("299 - \"{text}\"")) {
            response.headers_mut().append(header::WARNING, value);
        }
    }
    Ok(response)
}

fn watch_response(server: &ApiServer, target: &Target, parameters: &Parameters) -> Result<Response, Refusal> {
    let body: Body = watch::open(server.store.clone(), target, parameters)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

fn get(server: &ApiServer, target: &Target, parameters: &Parameters) -> Result<Response, Refusal> {
    let found = server.store.get(&target.kind.id(), &target.namespace, &target.name);
    let object = found.ok_or_else(|| Refusal::not_found(&target.kind.qualified(), &target.name))?;
    Ok(render(target, parameters, StatusCode::OK, &object))
}

fn list(server: &ApiServer, target: &Target, parameters: &Parameters) -> Result<Response, Refusal> {
    let namespace = (!target.namespace.is_empty()).then_some(target.namespace.as_str());
    let (objects, revision) = server.store.list(&target.kind.id(), namespace);
    let selector = parameters.selector()?;
    let objects: Vec<_> = objects.iter().map(|object| events::shown(&target.kind, object)).collect();
    let wanted: Vec<&Value> =
        objects.iter().map(|object| &**object).filter(|object| selector.matches(object)).collect();
    // The whole list in one answer, whatever `limit` says: a limit is a request, not a demand.
    let metadata = json!({"resourceVersion": revision.to_string()});
    let answer = match parameters.form {
        Form::Table => {
            let include = parameters.get("includeObject");
            table::render(&target.kind, &wanted, &revision.to_string(), include, jiff::Timestamp::now())
        }
        Form::Partial => {
            let items: Vec<Value> = wanted.iter().map(|object| table::partial(object)).collect();
            json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "items": items})
        }
        Form::Whole => {
            let kind = format!("{}List", target.kind.kind);
            json!({"kind": kind, "apiVersion": target.kind.api_version(), "metadata": metadata, "items": wanted})
        }
    };
    Ok(json_response(StatusCode::OK, &answer))
}

fn evict(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    body: &Value,
) -> Result<write::Done, Refusal> {
    let whole = Target { subresource: String::new(), ..target.clone() };
    // There are no budgets here that could stand against it.
    remove::delete(server, &whole, parameters, &body["deleteOptions"])?;
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    Ok(write::Done { object: status.into(), created: true, warnings: Vec::new() })
}

fn delete_all(
    server: &ApiServer,
    target: &Target,
    parameters: &Parameters,
    options: &Value,
) -> Result<Response, Refusal> {
    let namespace = (!target.namespace.is_empty()).then_some(target.namespace.as_str());
    let (objects, revision) = server.store.list(&target.kind.id(), namespace);
    let selector = parameters.selector()?;
    let mut gone = Vec::new();
    for object in objects.iter().filter(|object| selector.matches(&events::shown(&target.kind, object))) {
        let one = Target {
            namespace: object::namespace(object).into(),
            name: object::name(object).into(),
            ..target.clone()
        };
        match remove::delete(server, &one, parameters, options) {
            Ok(_) => gone.push(Value::clone(object)),
            Err(refusal) if refusal.code == StatusCode::NOT_FOUND => {}
            Err(refusal) => return Err(refusal),
        }
    }
    let kind = format!("{}List", target.kind.kind);
    let metadata = json!({"resourceVersion": revision.to_string()});
    let answer =
        json!({"kind": kind, "apiVersion": target.kind.api_version(), "metadata": metadata, "items": gone});
    Ok(json_response(StatusCode::OK, &answer))
}

fn render(target: &Target, parameters: &Parameters, code: StatusCode, object: &Value) -> Response {
    if object["kind"] == "Status" {
        return json_response(code, object);
    }
    let object = &*events::shown(&target.kind, object);
    if target.subresource == "scale" {
        return json_response(code, &scale::of(object));
    }
    match parameters.form {
        Form::Whole => json_response(code, object),
        Form::Partial => json_response(code, &table::partial(object)),
        Form::Table => {
            let (include, at) = (parameters.get("includeObject"), version(object).to_string());
            json_response(code, &table::render(&target.kind, &[object], &at, include, jiff::Timestamp::now()))
        }
    }
}

fn json_response(code: StatusCode, body: &Value) -> Response {
    (code, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}
