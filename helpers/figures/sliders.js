(function () {
  var script = document.currentScript, figure = script && script.closest("figure");
  if (!figure) return;
  var views = figure.querySelectorAll(".wso-view"), controls = figure.querySelectorAll("[data-labels]");
  var shown = figure.querySelector(".wso-on"), timer = 0;
  var still = matchMedia("(prefers-reduced-motion: reduce)");
  function at(control) {
    var range = control.querySelector("[type=range]");
    return +(range || control.querySelector(":checked")).value;
  }
  function draw() {
    var frame = 0;
    controls.forEach(function (control) {
      var labels = JSON.parse(control.dataset.labels), range = control.querySelector("[type=range]");
      frame = frame * labels.length + at(control);
      if (!range) return;
      range.setAttribute("aria-valuetext", labels[at(control)]);
      control.querySelector("output").textContent = labels[at(control)];
    });
    if (shown == views[frame]) return;
    var left = shown.scrollLeft;
    shown.classList.remove("wso-on");
    shown = views[frame];
    shown.classList.add("wso-on");
    shown.scrollLeft = left;
    if (!still.matches) shown.querySelectorAll("[data-move]").forEach(move);
  }
  function move(parcel) {
    var by = parcel.dataset.move.split(" ").join("px,");
    parcel.animate([{ transform: "translate(" + by + "px)" }, { transform: "none" }], { duration: 700, easing: "ease" });
  }
  function stop() {
    clearInterval(timer);
    timer = 0;
    figure.classList.remove("wso-playing");
  }
  function play(range) {
    if (timer) return stop();
    if (range.value == range.max) range.value = 0;
    else range.value++;
    draw();
    figure.classList.add("wso-playing");
    timer = setInterval(function () {
      if (range.value == range.max) return stop();
      range.value++;
      draw();
    }, 1200);
  }
  controls.forEach(function (control) {
    control.addEventListener("input", function () { stop(); draw(); });
    var button = control.querySelector("button"), range = control.querySelector("[type=range]");
    if (!button) return;
    button.addEventListener("click", function () { play(range); });
    figure.addEventListener("keydown", function (event) {
      var by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !event.target.closest(".wso-view")) return;
      event.preventDefault();
      stop();
      range.value = +range.value + by;
      draw();
    });
  });
  figure.querySelector(".wso-controls").hidden = false;
  draw();
})();
