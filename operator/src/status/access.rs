//! Who may see the page: whoever the API server lets list what it shows.

use std::sync::Arc;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;

use gpu_migrate_model::names::GROUP;

/// Tokens that are reviewed at a time: others are told to come again, so that nobody floods the API server from here.
const AT_ONCE: usize = 8;
/// What nobody sees the page without.
const SHOWN: [&str; 2] = ["gpushadows", "gpumigrations"];

/// What a viewer may see beside cards and projects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// The Events that our components wrote.
    pub events: bool,
}

/// Why the page is not shown.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("a bearer token of the cluster is needed: kubectl create token SERVICEACCOUNT")]
    NoToken,
    #[error("the API server does not accept the token: {0}")]
    Unknown(String),
    #[error("{user} may not list {resource}.{GROUP}; bind a ClusterRole with that verb")]
    Forbidden { user: String, resource: &'static str },
    #[error("too many tokens are being reviewed; try again")]
    Busy,
    #[error("the API server could not be asked: {0}")]
    Unavailable(String),
}

/// How access is decided.
#[derive(Clone)]
pub enum Access {
    /// By a TokenReview and a SubjectAccessReview for each kind of object that is shown.
    ByToken(Client, Arc<Semaphore>),
    /// By whatever is before it.
    Everybody,
}

impl Access {
    /// By the API server.
    #[must_use]
    pub fn by_token(client: Client) -> Self {
        Self::ByToken(client, Arc::new(Semaphore::new(AT_ONCE)))
    }

    /// What the owner of this token may see.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn check(&self, token: Option<&str>) -> Result<Sight, Refusal> {
        let Self::ByToken(client, reviews) = self else { return Ok(Sight { events: true }) };
        let token = token.map(str::trim).filter(|token| !token.is_empty()).ok_or(Refusal::NoToken)?;
        let _one = reviews.try_acquire().map_err(|_| Refusal::Busy)?;
        let unavailable = |error: kube::Error| Refusal::Unavailable(error.to_string());
        let spec = TokenReviewSpec { token: Some(token.to_owned()), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviews = Api::<TokenReview>::all(client.clone());
        let answer = reviews.create(&PostParams::default(), &review).await.map_err(unavailable)?;
        let status = answer.status.unwrap_or_default();
        let Some(user) = status.user.filter(|_| status.authenticated == Some(true)) else {
            return Err(Refusal::Unknown(status.error.unwrap_or_else(|| "not authenticated".to_owned())));
        };
        let reviews = Api::<SubjectAccessReview>::all(client.clone());
        let may_list = async |group: &str, resource: &str| {
            let review = SubjectAccessReview {
                spec: SubjectAccessReviewSpec {
                    user: user.username.clone(),
                    groups: user.groups.clone(),
                    uid: user.uid.clone(),
                    extra: user.extra.clone(),
                    resource_attributes: Some(ResourceAttributes {
                        group: Some(group.to_owned()),
                        resource: Some(resource.to_owned()),
                        verb: Some("list".to_owned()),
                        ..ResourceAttributes::default()
                    }),
                    ..SubjectAccessReviewSpec::default()
                },
                ..SubjectAccessReview::default()
            };
            let answer = reviews.create(&PostParams::default(), &review).await.map_err(unavailable)?;
            Ok(answer.status.is_some_and(|status| status.allowed))
        };
        for resource in SHOWN {
            if !may_list(GROUP, resource).await? {
                let user = user.username.clone().unwrap_or_default();
                return Err(Refusal::Forbidden { user, resource });
            }
        }
        Ok(Sight { events: may_list("events.k8s.io", "events").await? })
    }
}
