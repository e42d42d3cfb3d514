//! What tests of watches need of an API server: a client of a function, and responses that go on.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use http::{Request, Response};
use http_body_util::StreamBody;
use hyper::body::{Bytes, Frame};

pub(crate) type Answer = Response<StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>>;

/// A client whose requests `answer` answers.
pub(crate) fn client<F, Fut>(answer: F) -> kube::Client
where
    F: Fn(Request<kube::client::Body>) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = Answer> + Send + 'static,
{
    let service = tower::service_fn(move |request| {
        let answered = answer(request);
        async move { Ok::<_, Infallible>(answered.await) }
    });
    kube::Client::new(service, "default")
}

/// A response of these pieces, which ends when they do.
pub(crate) fn respond(chunks: BoxStream<'static, Bytes>) -> Answer {
    Response::new(StreamBody::new(chunks.map(|chunk| Ok(Frame::data(chunk))).boxed()))
}

pub(crate) async fn eventually(what: &str, check: impl Fn() -> bool) {
    for _ in 0..1000 {
        if check() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} did not happen");
}
