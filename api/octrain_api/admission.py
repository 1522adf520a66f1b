"""Who asks, and whether as often as allowed: decided before anything else is done for a request."""

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octrain_api.keys.last_use import LastUse
from octrain_api.keys.principal import Principal
from octrain_api.keys.principal import Scope as KeyScope
from octrain_api.keys.principals import Principals
from octrain_api.observability.measures import Measures
from octrain_api.problems import Problem, database_problem, response
from octrain_api.rate_limits.limiter import AddressLimiter, RateLimiter
from octrain_api.rate_limits.policy import Decision, Policy
from octrain_api.sessions.cookies import OpenSession, read_cookie
from octrain_api.sessions.defence import check_origin, check_unsafe, signs_in
from octrain_api.sessions.holders import SessionHolders
from octrain_api.settings import RateLimitSettings

# Asked whatever the database does, which tells who holds a key: nobody is looked for here.
_OF_THE_PROCESS = frozenset({"/healthz", "/readyz"})


class Admission:
    """Finds the holder of the request's key or session and counts the request against their limit.

    Endpoints say for themselves which scope they need; what they are told here is who asks, in
    `request.state.principal`. A request without a valid key goes on as well: some routes are open.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: RateLimitSettings,
        principals: Principals,
        sessions: SessionHolders,
        origins: frozenset[str],
        limiter: RateLimiter,
        last_use: LastUse,
        measures: Measures,
    ) -> None:
        self._app = app
        self._principals = principals
        self._sessions = sessions
        self._origins = origins
        self._limiter = limiter
        self._last_use = last_use
        self._measures = measures
        self._policies = {
            name: Policy(name, quota, settings.window) if quota else None
            for name, quota in (
                ("read", settings.read),
                ("write", settings.write),
                ("worker", settings.worker),
                ("address", settings.address),
                ("sign-in", settings.sign_in),
            )
        }
        self._addresses = AddressLimiter(self._policies["address"])
        self._sign_ins = AddressLimiter(self._policies["sign-in"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse with 429."""
        if scope["type"] != "http" or scope["path"] in _OF_THE_PROCESS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = bearer_key(headers.get("authorization"))
        client = scope.get("client")
        address = str(client[0]) if client else "unknown"
        state = scope.setdefault("state", {})
        try:
            if key is not None:
                self._check(self._addresses.allows(address))
                principal = await self._principals.of(key)
                if principal is not None:
                    state["principal"] = principal
                    self._last_use.note(principal.key_id)
                    await self._count(scope, principal)
            elif signs_in(scope):
                self._check(self._addresses.allows(address))
                self._check(self._sign_ins.allows(address))
                self._sign_ins.count(address)
                check_origin(headers, self._origins)
            elif "authorization" not in headers:
                await self._admit_session(scope, headers, address)
        except Exception as error:
            problem = error if isinstance(error, Problem) else database_problem(error)
            if problem is None:
                raise
            await response(Request(scope), problem)(scope, receive, send)
            return

        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                self._addresses.count(address)
            await send(message)

        await self._app(scope, receive, answering)

    async def _admit_session(self, scope: Scope, headers: Headers, address: str) -> None:
        """The holder of the request's cookie; what its session cannot have sent is refused."""
        token = read_cookie(headers)
        if token is None:
            return
        self._check(self._addresses.allows(address))
        principal = await self._sessions.of(token)
        if principal is None:
            return
        state = scope["state"]
        state["principal"] = principal
        state["session"] = session = OpenSession(token)
        self._last_use.note(principal.key_id)
        await self._count(scope, principal)
        check_unsafe(scope, headers, session, self._origins)

    async def _count(self, scope: Scope, principal: Principal) -> None:
        policy = self._policies[_class_of(scope["method"], principal)]
        if policy is None:
            return
        decision = await self._limiter.take(principal.key_id, policy)
        scope["state"]["rate_limit_headers"] = decision.headers()
        if not decision.allowed:
            self._check(decision)

    def _check(self, refusal: Decision | None) -> None:
        if refusal is None:
            return
        policy = refusal.policy
        self._measures.refused_by_rate.labels(policy.name).inc()
        raise Problem(
            429,
            "rate-limited",
            "Too many requests",
            f"{policy.quota} requests in {policy.window} s are allowed here (limit "
            f"{policy.name!r}). Try again in {refusal.retry_after} s.",
            headers={"Retry-After": str(refusal.retry_after)},
            limit=policy.name,
        )


def _class_of(method: str, principal: Principal) -> str:
    if KeyScope.NODE in principal.scopes:
        return "worker"
    return "read" if method in ("GET", "HEAD", "OPTIONS") else "write"


def bearer_key(authorization: str | None) -> str | None:
    """The key of an `Authorization: Bearer` header, as the HTTP scheme's parser takes it."""
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    return key if scheme.lower() == "bearer" and key else None
