//! The errors of a command as one sentence: what failed, on which object of which cluster, why, what to do.

use std::error::Error;

/// An error with its contexts. Of an error of the API server's client only what a person can use.
#[must_use]
pub fn sentence(error: &anyhow::Error, server: Option<&str>) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        if let Some(cause) = cause.downcast_ref::<kube::Error>() {
            parts.push(of_server(cause, server));
            break;
        }
        let text = cause.to_string();
        // Many errors repeat the one that they are caused by.
        if parts.last().is_none_or(|before| !before.contains(&text)) {
            parts.push(text);
        }
    }
    parts.join(": ")
}

/// What the API server answered, or that it did not.
#[must_use]
pub fn of_server(error: &kube::Error, server: Option<&str>) -> String {
    let at = server.map(|server| format!(" (API server {server})")).unwrap_or_default();
    match error {
        kube::Error::Api(status) => {
            let message = if status.message.is_empty() { &status.reason } else { &status.message };
            let hint = match status.code {
                401 => "; log in again: the credentials of the kubeconfig were refused",
                403 => "; ask for this right, or use another account (kubectl auth can-i --list shows yours)",
                404 if message.starts_with("404 page not found")
                    || message.contains("could not find the requested") =>
                {
                    "; are the CustomResourceDefinitions installed? (kubectl apply --server-side -k deploy/crds)"
                }
                429 | 500..=599 => "; try again later",
                _ => "",
            };
            format!("{}{at}{hint}", message.trim_end_matches(['.', '\n']))
        }
        kube::Error::SerdeError(error) => format!("the answer cannot be read: {error}{at}"),
        other => format!(
            "the API server{} cannot be reached: {}; is this the right cluster (--context, --kubeconfig)?",
            server.map(|server| format!(" {server}")).unwrap_or_default(),
            root(other)
        ),
    }
}

/// Whether the API server does not have such objects, or such a kind: definitions that are not installed (404), or a server that
/// implements a part of Kubernetes (501).
#[must_use]
pub fn is_absent(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if [404, 501].contains(&status.code))
}

/// The cause of all causes: the errors above repeat it.
fn root(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;

    fn api(code: u16, message: &str) -> kube::Error {
        kube::Error::Api(Box::new(kube::core::Status { code, message: message.into(), ..Default::default() }))
    }

    #[test]
    fn an_answer_of_the_server_is_one_sentence_with_address_and_hint() {
        let forbidden = "pods is forbidden: User \"eve\" cannot list resource \"pods\" in API group \"\" at the cluster scope";
        let error = Err::<(), _>(api(403, forbidden)).context("list pods").unwrap_err();
        assert_eq!(
            sentence(&error, Some("https://10.0.0.1:6443")),
            format!(
                "list pods: {forbidden} (API server https://10.0.0.1:6443); ask for this right, or use another account (kubectl auth can-i --list shows yours)"
            )
        );
        let gone =
            Err::<(), _>(api(404, "gpumigrations.gpu-migrate.io \"x\" not found")).context("GPUMigration x");
        assert_eq!(
            sentence(&gone.unwrap_err(), None),
            "GPUMigration x: gpumigrations.gpu-migrate.io \"x\" not found"
        );
    }

    #[test]
    fn a_server_that_is_away_is_named_once() {
        let refused = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "Connection refused");
        let error = anyhow::Error::from(kube::Error::Service(Box::new(refused))).context("list nodes");
        let text = sentence(&error, Some("https://127.0.0.1:1"));
        assert_eq!(
            text,
            "list nodes: the API server https://127.0.0.1:1 cannot be reached: Connection refused; is this the right cluster (--context, --kubeconfig)?"
        );
    }

    #[test]
    fn other_errors_keep_their_contexts_and_repeat_nothing() {
        let io = std::io::Error::other("disk full");
        let error = anyhow::Error::from(io).context("write plan.html: disk full").context("simulate");
        assert_eq!(sentence(&error, None), "simulate: write plan.html: disk full");
    }
}
